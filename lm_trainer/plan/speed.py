"""Cost model of the time of a step on a layout: matrix products, memory and communication, without compilation.

The model is meant to rank layouts, not to predict seconds: it assumes that nothing overlaps, that matrix products reach
the assumed MFU, and that links and memory reach the figures of their datasheet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lm_trainer.nn.spec import DecoderSpec
from lm_trainer.parallel.mesh import MODEL_PARALLEL_AXES
from lm_trainer.parallel.tree_sum import Shares
from lm_trainer.profile.devices import NODE, Bandwidths, device_platform
from lm_trainer.profile.flops import flops_per_token, parameter_count, recomputed_flops_per_token, ring_score_fraction
from lm_trainer.run.build.model import recomputes_layers
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan

_PCIE = 25e9
"""Bytes per second between GPUs without NVLink: PCIe 4.0 with 16 lanes has 32 GB/s, minus protocol overhead."""
_ADAPTER = 12.5e9
"""Bytes per second between nodes whose network adapter is unknown: 100 Gb/s."""
_SCORE_PASSES = 10
"""Number of passes of float32 scores through memory without a fused kernel: four in the forward pass (scores, two for
the softmax, the weighted sum) and six in the backward pass."""
_FLOAT32 = 4


@dataclass(frozen=True)
class StepCost:
    """Time of a step on the busiest device in seconds, divided into parts."""

    compute: float
    """Matrix products of the model, at the assumed MFU."""
    recompute: float
    """Matrix products recomputed in the backward pass."""
    memory: float
    """Memory traffic of parameters, gradients and scores."""
    network: float
    """Communication of parameters, gradients and activations."""
    idle: float
    """Waiting for devices that have more microbatches, or for other pipeline stages."""

    @property
    def seconds(self) -> float:
        """Sum of all parts, because no overlap is assumed."""
        return self.compute + self.recompute + self.memory + self.network + self.idle


@dataclass(frozen=True)
class Machine:
    """Figures of a device that the cost model uses."""

    kind: str
    flops: float
    """FLOP/s that matrix products reach on one device."""
    bandwidths: Bandwidths

    def link_bandwidth(self, span: int, *, exchange: bool = False) -> float:
        """Returns the bytes per second that a device sends within a group of `span` neighbours.

        Args:
            span: number of devices from the first to the last participant.
            exchange: True for an all-to-all, most of which goes between nodes. Otherwise a ring passes through every
                device of a node once, and the adapters of the node share the traffic.
        """
        inside = self.bandwidths.network or _PCIE
        if device_platform(self.kind) != "gpu" or span <= NODE:
            return inside
        adapter = self.bandwidths.between_nodes or _ADAPTER
        return min(inside, adapter if exchange else NODE * adapter)


@dataclass(frozen=True)
class LayoutWork:
    """Work of a step on a layout."""

    spec: DecoderSpec
    trainer: TrainerConfig
    seq_len: int
    plan: MicrobatchPlan
    """Division of the largest batch of the run."""
    sizes: dict[str, int]
    """Mesh axis -> number of devices."""
    shards: int
    """Number of shards of the rows of a batch."""
    gathers: int
    """Number of times that a layer is gathered per step, once per microbatch group; forward and backward count as
    one."""
    params: int
    """Number of parameters that one device computes with, gathered over the batch axes."""
    backend: str
    """Attention backend."""
    training_flops: int
    """Number of FLOPs per token of a training step."""

    @property
    def group(self) -> int:
        """Number of devices that share the rows or positions of a microbatch."""
        return math.prod(self.sizes[axis] for axis in MODEL_PARALLEL_AXES)

    @property
    def tensor(self) -> int:
        return self.sizes["model"]

    @property
    def microbatches(self) -> int:
        """Number of microbatches of the busiest device."""
        return Shares(self.plan.count, self.shards).max_terms

    @property
    def tokens(self) -> float:
        """Number of tokens of one microbatch that a device computes."""
        return self.plan.rows * self.seq_len / self.group

    @property
    def layerwise(self) -> bool:
        return self.trainer.gathers_layers

    @property
    def recomputes(self) -> bool:
        return recomputes_layers(self.trainer, self.spec) or self.spec.remat != "none"

    @property
    def itemsize(self) -> int:
        return self.trainer.mp.compute_dtype.itemsize


def step_cost(work: LayoutWork, machine: Machine) -> StepCost:
    """Returns the time of a training step on a layout."""
    count = flops_per_token(work.spec, work.seq_len)
    hidden = 0.0
    if work.backend == "ring":
        share = ring_score_fraction(work.spec, work.seq_len, work.sizes["context"])
        hidden = 3 * (1 - share) * (count.attention_product + count.attention_softmax)
    # Tensor parallelism does not shard the output head.
    divided = (count.forward - count.head) / work.tensor + count.head
    flops = (work.training_flops - hidden) * divided / count.forward
    every_layer = recomputes_layers(work.trainer, work.spec)
    recomputed = recomputed_flops_per_token(work.spec, work.seq_len, every_layer=every_layer) / work.tensor
    compute, recompute = (work.tokens * work_flops / machine.flops for work_flops in (flops, recomputed))
    # Average over devices, as if microbatches were divisible. The busiest device has an integer number of microbatches.
    even = work.plan.count / work.shards
    stages = work.sizes["pipeline"]
    bubble = (work.plan.rows + stages - 1) / work.plan.rows - 1
    memory = work.microbatches * _memory_traffic_bytes(work) / machine.bandwidths.memory
    return StepCost(
        compute=even * compute,
        recompute=even * recompute,
        memory=memory,
        network=_communication_seconds(work, machine),
        idle=(work.microbatches - even + work.microbatches * bubble) * (compute + recompute),
    )


def _memory_traffic_bytes(work: LayoutWork) -> float:
    """Returns the bytes that a microbatch reads and writes, except inputs and outputs of matrix products."""
    # Weights are read by three products, or by four with recomputation. A gradient is written, and added to another
    # one.
    passes = (4 if work.recomputes else 3) * work.itemsize + 4 * _FLOAT32
    scores = 0.0
    if work.backend in ("xla", "ring"):
        share = ring_score_fraction(work.spec, work.seq_len, work.sizes["context"]) if work.backend == "ring" else 1.0
        heads = sum(block.attention.num_heads for block in work.spec.blocks) / work.tensor
        scores = _SCORE_PASSES * _FLOAT32 * share * work.tokens * work.seq_len * heads
    # A pipeline processes rows one by one, and each of its steps reads the weights and gradients of the stage.
    stages = work.sizes["pipeline"]
    layers = parameter_count(work.spec) - parameter_count(replace(work.spec, blocks=()))
    pipeline_layers = 0 if stages == 1 else (work.plan.rows + stages - 2) * layers / (stages * work.tensor)
    return (work.params + pipeline_layers) * passes + scores


def _communication_seconds(work: LayoutWork, machine: Machine) -> float:
    return _batch_axes_seconds(work, machine) + work.microbatches * (
        _tensor_parallel_seconds(work, machine)
        + _context_parallel_seconds(work, machine)
        + _expert_parallel_seconds(work, machine)
        + _gradient_sum_seconds(work, machine)
    )


def _batch_axes_seconds(work: LayoutWork, machine: Machine) -> float:
    """Returns the time of gathering parameters and summing gradients."""
    if work.shards == 1:
        return 0.0
    span = math.prod(work.sizes.values())
    part = (work.shards - 1) / work.shards * work.params
    if work.layerwise:
        # Gradients are exchanged in the compute dtype, or as sums in float32.
        gathered = 2 * work.gathers * work.itemsize
        reduced = work.gathers * (work.itemsize if work.gathers == work.microbatches else _FLOAT32)
    elif not work.trainer.bitwise:
        gathered, reduced = 2 * work.microbatches * work.itemsize, work.microbatches * work.itemsize
    else:
        gathered, reduced = _FLOAT32, _FLOAT32
    fixed_order = work.trainer.bitwise
    return part * gathered / machine.link_bandwidth(span) + part * reduced / machine.link_bandwidth(
        span, exchange=fixed_order
    )


def _tensor_parallel_seconds(work: LayoutWork, machine: Machine) -> float:
    """Returns the time of activation sums after attention and MLP: forward, backward, and once more if recomputed."""
    ring = 2 * (work.tensor - 1) / work.tensor
    sums = 2 * (3 if work.recomputes else 2) * len(work.spec.blocks)
    return sums * ring * work.tokens * work.spec.hidden_dim * work.itemsize / machine.link_bandwidth(work.tensor)


def _context_parallel_seconds(work: LayoutWork, machine: Machine) -> float:
    """Returns the time of sending keys and values, and their gradients in float32."""
    size = work.sizes["context"]
    width = sum(2 * block.attention.kv_heads * block.attention.head_dim for block in work.spec.blocks) / work.tensor
    passes = (2 if work.recomputes else 1) * work.itemsize + _FLOAT32
    sent = (size - 1) * work.tokens * width * passes
    return sent / machine.link_bandwidth(size * work.sizes["expert"] * work.tensor)


def _expert_parallel_seconds(work: LayoutWork, machine: Machine) -> float:
    """Returns the time of expert parallelism: tokens go to all devices that share experts, and sums return; twice."""
    size = work.sizes["expert"]
    passes = (3 if work.recomputes else 2) * (work.itemsize + _FLOAT32)
    sent = (size - 1) * work.tokens * work.spec.hidden_dim * work.spec.num_routers * passes
    return sent / machine.link_bandwidth(size * work.tensor)


def _gradient_sum_seconds(work: LayoutWork, machine: Machine) -> float:
    """Returns the time of summing a microbatch's gradients over the devices that share its rows or positions."""
    part = 2 * (work.group - 1) / work.group * work.params * _FLOAT32
    return part / machine.link_bandwidth(work.group * work.tensor, exchange=True)
