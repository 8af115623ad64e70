"""The work of the programs of a step, as their compiler wrote them, and the least and most time that it takes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_trainer.profile.collectives import bytes_sent
from lm_trainer.profile.devices import Bandwidths
from lm_trainer.profile.roofline import BLOCK_SCALED_PRODUCT, Operation, operations

_KERNEL = re.compile(rf'custom_call_target="(tpu_custom_call|__cudnn\$fmha\w*|{re.escape(BLOCK_SCALED_PRODUCT)})"')


@dataclass(frozen=True)
class ProgramWork:
    """The work of a program on one device, in one run of it."""

    name: str
    runs: int
    """Runs in a step."""
    operations: tuple[Operation, ...]
    sent: Mapping[str, float]
    """Collective -> bytes that the device sends."""
    kernels: Mapping[str, int]
    """Custom kernel, such as one of attention -> how often it stands in the program. FLOPs are counted of those for
    products of matrices alone."""

    @classmethod
    def of(cls, name: str, runs: int, hlo: str) -> ProgramWork:
        """Reads the text of a compiled program."""
        return cls(name, runs, tuple(operations(hlo, ())), bytes_sent(hlo), Counter(_KERNEL.findall(hlo)))

    @property
    def flops(self) -> float:
        """FLOPs of matrix products."""
        return sum(op.flops for op in self.operations)

    @property
    def num_bytes(self) -> float:
        """Bytes that operations read and write."""
        return sum(op.num_bytes for op in self.operations)


@dataclass(frozen=True)
class ProgramTime:
    """Seconds of one run of a program by each limit of the device, if nothing else bound it."""

    name: str
    runs: int
    compute: float
    memory: float
    network: float
    one_by_one: float
    """Seconds of its operations one after another, each bound by compute or memory, without what it sends."""

    @property
    def least(self) -> float:
        """Everything overlaps."""
        return max(self.compute, self.memory, self.network)

    @property
    def most(self) -> float:
        """Nothing overlaps, and all operations reach their limit."""
        return self.one_by_one + self.network


@dataclass(frozen=True)
class StepTime:
    """The time of a step by its compiled programs: no program of another step or of the host is counted."""

    programs: tuple[ProgramTime, ...]
    flops: float
    """FLOPs of the model in a step on one device, by formula."""
    peak: float
    """FLOP/s of one device."""

    @property
    def least(self) -> float:
        """Seconds if everything in a program overlaps; never less than the model's FLOPs at the device's peak."""
        return max(sum(p.runs * p.least for p in self.programs), self.flops / self.peak)

    @property
    def most(self) -> float:
        """Seconds if nothing overlaps."""
        return max(sum(p.runs * p.most for p in self.programs), self.least)

    @property
    def bound_by(self) -> str:
        """The limit that the most seconds of a step go with."""
        limits = ("compute", "memory", "network")
        sums = {limit: sum(p.runs * getattr(p, limit) for p in self.programs) for limit in limits}
        return max(sums, key=lambda limit: sums[limit])

    def mfu(self, seconds: float) -> float:
        """The share of the peak that the model's FLOPs are in so many seconds."""
        return self.flops / seconds / self.peak


@dataclass(frozen=True)
class CompiledStep:
    """The programs of a step by the compiler of the devices that they are for."""

    programs: tuple[ProgramWork, ...]
    time: StepTime | None
    """None where no datasheet has the figures."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, in SI units."""
        programs = [
            {
                "name": work.name,
                "runs": work.runs,
                "flops": work.flops,
                "bytes_moved": work.num_bytes,
                "bytes_sent": dict(work.sent),
                "kernels": dict(work.kernels),
            }
            for work in self.programs
        ]
        found: dict[str, Any] = {"programs": programs}
        if self.time is not None:
            least, most = self.time.least, self.time.most
            found["step_seconds"] = {"least": least, "most": most}
            found["mfu"] = {"least": self.time.mfu(most), "most": self.time.mfu(least)}
            found["bound_by"] = self.time.bound_by
        return found


def step_time(programs: Sequence[ProgramWork], flops: float, peak: float, bandwidths: Bandwidths) -> StepTime:
    """The time of a step.

    Args:
        programs: of the step.
        flops: of the model in a step on one device.
        peak: FLOP/s of one device.
        bandwidths: of one device.
    """

    def time(work: ProgramWork) -> ProgramTime:
        limits = [(op.flops / peak, op.num_bytes / bandwidths.memory) for op in work.operations]
        return ProgramTime(
            work.name,
            work.runs,
            compute=sum(compute for compute, _ in limits),
            memory=sum(memory for _, memory in limits),
            network=0.0 if bandwidths.network is None else sum(work.sent.values()) / bandwidths.network,
            one_by_one=sum(map(max, limits)),
        )

    return StepTime(tuple(map(time, programs)), flops, peak)
