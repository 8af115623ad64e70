"""Work done by the compiled programs of a step, with lower and upper bounds of its time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_trainer.profile.attention_kernels import count_products
from lm_trainer.profile.collectives import list_transfers, sum_bytes_sent
from lm_trainer.profile.devices import Bandwidths
from lm_trainer.profile.expert_kernels import TRITON
from lm_trainer.profile.hlo import parse_program
from lm_trainer.profile.network import Network
from lm_trainer.profile.roofline import BLOCK_SCALED_PRODUCT, Operation, list_operations

_OTHERS = "|".join(map(re.escape, (BLOCK_SCALED_PRODUCT, TRITON)))
_KERNEL = re.compile(rf'custom_call_target="(tpu_custom_call|__cudnn\$fmha\w*|{_OTHERS})"')

_LAYER = re.compile(r"layer (\d+)")

_EXCHANGES_AT_ENDS = {"gather layer": 3, "reduce layer": 2}
"""Number of exchanges at the ends of passes: a layer is gathered before the forward pass, and two before the backward
pass, which reduces the gradients of two layers after it has computed them."""


@dataclass(frozen=True)
class TargetFigures:
    """Figures of the devices and the model that the text of a program does not show."""

    network: Network
    """Links between the devices."""
    attention_flops: Sequence[float] = (0.0,)
    """FLOPs of one product of queries and keys in a microbatch on one device, for each kind of layer."""

    def flops_of_attention_product(self, program: str) -> float:
        """Returns the FLOPs of one product of queries and keys in a program: of its kind of layer, or the mean."""
        if (match := _LAYER.search(program)) and int(match[1]) < len(self.attention_flops):
            return self.attention_flops[int(match[1])]
        return sum(self.attention_flops) / len(self.attention_flops)


@dataclass(frozen=True)
class ProgramWork:
    """Work done by one run of a program on one device."""

    name: str
    runs: int
    """Number of runs per step."""
    operations: tuple[Operation, ...]
    sent: Mapping[str, float]
    """Collective -> number of bytes that the device sends."""
    kernels: Mapping[str, int]
    """Custom kernel, such as attention -> number of occurrences in the program."""
    sent_to_nodes: float = 0.0
    """Bytes the device sends to other nodes, included in `sent`."""
    network_seconds: float = 0.0
    """Lower bound of the time of all transfers, one after another."""
    kernel_flops: float = 0.0
    """FLOPs of attention kernels."""

    @classmethod
    def from_hlo(cls, name: str, runs: int, hlo: str, target: TargetFigures | None = None) -> ProgramWork:
        """Analyses the text of a compiled program; without a target, transfers and attention kernels take no time."""
        transfers, target = list_transfers(hlo), target or TargetFigures(Network(None))
        return cls(
            name=name,
            runs=runs,
            operations=tuple(list_operations(hlo, ())),
            sent=sum_bytes_sent(transfers),
            sent_to_nodes=sum(map(target.network.bytes_between_nodes, transfers)),
            network_seconds=sum(map(target.network.seconds, transfers)),
            kernels=Counter(_KERNEL.findall(hlo)),
            kernel_flops=count_products(parse_program(hlo)) * target.flops_of_attention_product(name),
        )

    @property
    def flops(self) -> float:
        """FLOPs of matrix products and attention kernels."""
        return sum(op.flops for op in self.operations) + self.kernel_flops

    @property
    def num_bytes(self) -> float:
        """Number of bytes that operations read and write."""
        return sum(op.num_bytes for op in self.operations)


@dataclass(frozen=True)
class ProgramTime:
    """Time in seconds of one run of a program by each limit of the device, as if it were the only limit."""

    name: str
    runs: int
    compute: float
    memory: float
    network: float
    one_by_one: float
    """Time of the operations in sequence, each bound by compute or memory, without communication."""

    @property
    def lower_bound(self) -> float:
        """Time in seconds if everything overlaps."""
        return max(self.compute, self.memory, self.network)

    @property
    def upper_bound(self) -> float:
        """Time in seconds without any overlap, if each operation reaches its limit."""
        return self.one_by_one + self.network


@dataclass(frozen=True)
class StepTime:
    """Time of a step computed from its compiled programs. Excludes programs of other steps and work on the host."""

    programs: tuple[ProgramTime, ...]
    flops: float
    """Number of model FLOPs of a step on one device, by formula."""
    peak: float
    """Peak FLOP/s of one device."""

    @property
    def lower_bound(self) -> float:
        """Time in seconds if everything in a program overlaps; never less than model FLOPs over the device's peak."""
        return max(sum(p.runs * p.lower_bound for p in self.programs), self.flops / self.peak)

    @property
    def upper_bound(self) -> float:
        """Time in seconds without any overlap."""
        return max(sum(p.runs * p.upper_bound for p in self.programs), self.lower_bound)

    @property
    def bound_by(self) -> str:
        """Limit that accounts for most of the time of a step."""
        limits = ("compute", "memory", "network")
        sums = {limit: sum(p.runs * getattr(p, limit) for p in self.programs) for limit in limits}
        return max(sums, key=lambda limit: sums[limit])

    def mfu(self, seconds: float) -> float:
        """Returns the model FLOP utilisation of a step that takes `seconds`."""
        return self.flops / seconds / self.peak


@dataclass(frozen=True)
class CompiledStep:
    """Programs of a step, compiled with the compiler of the target devices."""

    programs: tuple[ProgramWork, ...]
    time: StepTime | None
    """Time of the step; None if no datasheet has the figures."""

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON, in SI units."""
        programs = [
            {
                "name": work.name,
                "runs": work.runs,
                "flops": work.flops,
                "bytes_moved": work.num_bytes,
                "bytes_sent": dict(work.sent),
                "bytes_sent_to_nodes": work.sent_to_nodes,
                "network_seconds": work.network_seconds,
                "kernel_flops": work.kernel_flops,
                "kernels": dict(work.kernels),
            }
            for work in self.programs
        ]
        content: dict[str, Any] = {"programs": programs, "overlapped_share": overlapped_share(self.programs)}
        if self.time is not None:
            lower, upper = self.time.lower_bound, self.time.upper_bound
            content["step_seconds"] = {"least": lower, "most": upper}
            content["mfu"] = {"least": self.time.mfu(upper), "most": self.time.mfu(lower)}
            content["bound_by"] = self.time.bound_by
        return content


def overlapped_share(programs: Sequence[ProgramWork]) -> float:
    """Returns the share of the exchanges of layers that overlap with a computation, by their time.

    Exchanges at the ends of a pass never overlap, and do not count. 1 if there are no others.
    """
    separate = sum(
        max(0, work.runs - runs) * work.network_seconds
        for exchange, runs in _EXCHANGES_AT_ENDS.items()
        for work in programs
        if work.name.startswith(exchange)
    )
    overlapping = sum(work.runs * work.network_seconds for work in programs if " with " in work.name)
    return overlapping / (overlapping + separate) if separate else 1.0


def step_time(programs: Sequence[ProgramWork], flops: float, peak: float, bandwidths: Bandwidths) -> StepTime:
    """Computes the time of a step.

    Args:
        programs: compiled programs of the step.
        flops: number of model FLOPs of a step on one device.
        peak: peak FLOP/s of one device.
        bandwidths: bandwidths of one device.
    """

    def program_time(work: ProgramWork) -> ProgramTime:
        limits = [(op.flops / peak, op.num_bytes / bandwidths.memory) for op in work.operations]
        kernels = work.kernel_flops / peak
        return ProgramTime(
            work.name,
            work.runs,
            compute=sum(compute for compute, _ in limits) + kernels,
            memory=sum(memory for _, memory in limits),
            network=work.network_seconds,
            one_by_one=sum(map(max, limits)) + kernels,
        )

    return StepTime(tuple(map(program_time, programs)), flops, peak)
