"""The time of a step on some layout by a cost model: products, memory and what devices send, and nothing compiled.

The model orders layouts and does not foretell seconds: nothing overlaps in it, matrix products run at the assumed MFU,
and links and memory at the figures of their datasheet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lm_trainer.nn.spec import DecoderSpec
from lm_trainer.parallel.mesh import MODEL_PARALLEL_AXES
from lm_trainer.parallel.tree_sum import Shares
from lm_trainer.profile.devices import NODE, Bandwidths, device_platform
from lm_trainer.profile.flops import flops_per_token, parameter_count, recomputed_flops_per_token, ring_share
from lm_trainer.run.build.model import recomputes_layers
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan

_PCIE = 25e9
"""Bytes per second between GPUs without links of their own: PCIe 4.0 with 16 lanes has 32 GB/s less its protocol."""
_ADAPTER = 12.5e9
"""Bytes per second between nodes where the adapter is not known: 100 Gb/s."""
_SCORE_PASSES = 10
"""Passes of float32 scores through memory where no kernel keeps them on the chip: four of the forward pass (scores, two
of the softmax, the weighted sum) and six of the backward pass."""
_FLOAT32 = 4


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step on the device that has most to do, part by part."""

    compute: float
    """Products of the model, at the assumed MFU."""
    recompute: float
    """Products that the backward pass computes again."""
    memory: float
    """Parameters, gradients and scores on their way through memory."""
    network: float
    """Parameters, gradients and activations that the device sends."""
    idle: float
    """Waits for devices that have more microbatches, or for other stages of a pipeline."""

    @property
    def seconds(self) -> float:
        """All parts together: nothing overlaps."""
        return self.compute + self.recompute + self.memory + self.network + self.idle


@dataclass(frozen=True)
class Machine:
    """The figures of the devices that a cost follows from."""

    kind: str
    flops: float
    """FLOP/s of one device that products reach."""
    bandwidths: Bandwidths

    def link(self, span: int, *, exchange: bool = False) -> float:
        """Bytes per second that a device sends to others among `span` neighbours.

        Args:
            span: devices from the first to the last that take part.
            exchange: each sends to each, so that most goes between nodes; otherwise data pass through every device of a
                node once, whose adapters share them.
        """
        inside = self.bandwidths.network or _PCIE
        if device_platform(self.kind) != "gpu" or span <= NODE:
            return inside
        adapter = self.bandwidths.between_nodes or _ADAPTER
        return min(inside, adapter if exchange else NODE * adapter)


@dataclass(frozen=True)
class Work:
    """The work of a step on a layout."""

    spec: DecoderSpec
    trainer: TrainerConfig
    seq_len: int
    plan: MicrobatchPlan
    """The largest batch of the run."""
    sizes: dict[str, int]
    """Mesh axis -> devices."""
    shards: int
    """Shards of the rows of a batch."""
    turns: int
    """Times that a layer is gathered for some of the microbatches of a step, forward and backward together once."""
    params: int
    """Numbers in the parameters as one device computes with them, gathered over the batch axes."""
    backend: str
    """Implementation of attention."""
    training_flops: int
    """FLOPs of a training step for each token."""

    @property
    def group(self) -> int:
        """Devices that share the rows or positions of a microbatch."""
        return math.prod(self.sizes[axis] for axis in MODEL_PARALLEL_AXES)

    @property
    def tensor(self) -> int:
        return self.sizes["model"]

    @property
    def microbatches(self) -> int:
        """Microbatches of the device that has most."""
        return Shares(self.plan.count, self.shards).most

    @property
    def tokens(self) -> float:
        """Those of one microbatch that a device computes."""
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


def step_cost(work: Work, machine: Machine) -> StepCost:
    """The time of a step of training on a layout."""
    count = flops_per_token(work.spec, work.seq_len)
    hidden = 0.0
    if work.backend == "ring":
        share = ring_share(work.spec, work.seq_len, work.sizes["context"])
        hidden = 3 * (1 - share) * (count.attention_product + count.attention_softmax)
    # The head stays whole on every device that shares the heads and the width of the MLP.
    divided = (count.forward - count.head) / work.tensor + count.head
    flops = (work.training_flops - hidden) * divided / count.forward
    every_layer = recomputes_layers(work.trainer, work.spec)
    again = recomputed_flops_per_token(work.spec, work.seq_len, every_layer=every_layer) / work.tensor
    compute, recompute = (work.tokens * each / machine.flops for each in (flops, again))
    # Of all devices, if microbatches could be cut; the busiest one has whole ones.
    even = work.plan.count / work.shards
    stages = work.sizes["pipeline"]
    bubble = (work.plan.rows + stages - 1) / work.plan.rows - 1
    memory = work.microbatches * _bytes_moved(work) / machine.bandwidths.memory
    return StepCost(
        compute=even * compute,
        recompute=even * recompute,
        memory=memory,
        network=_seconds_sent(work, machine),
        idle=(work.microbatches - even + work.microbatches * bubble) * (compute + recompute),
    )


def _bytes_moved(work: Work) -> float:
    """Bytes that a microbatch reads and writes beside the arrays of its products."""
    # The weights of three products, or four; a gradient is written, and added to another one.
    passes = (4 if work.recomputes else 3) * work.itemsize + 4 * _FLOAT32
    scores = 0.0
    if work.backend in ("xla", "ring"):
        share = ring_share(work.spec, work.seq_len, work.sizes["context"]) if work.backend == "ring" else 1.0
        heads = sum(block.attention.num_heads for block in work.spec.blocks) / work.tensor
        scores = _SCORE_PASSES * _FLOAT32 * share * work.tokens * work.seq_len * heads
    # Rows go through a pipeline one by one, with every turn through the weights of the stage and their gradients.
    stages = work.sizes["pipeline"]
    layers = parameter_count(work.spec) - parameter_count(replace(work.spec, blocks=()))
    again = 0 if stages == 1 else (work.plan.rows + stages - 2) * layers / (stages * work.tensor)
    return (work.params + again) * passes + scores


def _seconds_sent(work: Work, machine: Machine) -> float:
    return _batch_axes(work, machine) + work.microbatches * (
        _tensor(work, machine) + _context(work, machine) + _experts(work, machine) + _shared_gradients(work, machine)
    )


def _batch_axes(work: Work, machine: Machine) -> float:
    """Gathers of parameters, and sums of gradients."""
    if work.shards == 1:
        return 0.0
    span = math.prod(work.sizes.values())
    part = (work.shards - 1) / work.shards * work.params
    if work.layerwise:
        # Gradients are exchanged as they were computed, or as sums.
        gathered = 2 * work.turns * work.itemsize
        reduced = work.turns * (work.itemsize if work.turns == work.microbatches else _FLOAT32)
    elif not work.trainer.bitwise:
        gathered, reduced = 2 * work.microbatches * work.itemsize, work.microbatches * work.itemsize
    else:
        gathered, reduced = _FLOAT32, _FLOAT32
    fixed_order = work.trainer.bitwise
    return part * gathered / machine.link(span) + part * reduced / machine.link(span, exchange=fixed_order)


def _tensor(work: Work, machine: Machine) -> float:
    """Sums of activations after attention and MLP, forward, backward and once more where they are computed again."""
    ring = 2 * (work.tensor - 1) / work.tensor
    sums = 2 * (3 if work.recomputes else 2) * len(work.spec.blocks)
    return sums * ring * work.tokens * work.spec.hidden_dim * work.itemsize / machine.link(work.tensor)


def _context(work: Work, machine: Machine) -> float:
    """Keys and values, and their gradients in float32."""
    size = work.sizes["context"]
    width = sum(2 * block.attention.kv_heads * block.attention.head_dim for block in work.spec.blocks) / work.tensor
    passes = (2 if work.recomputes else 1) * work.itemsize + _FLOAT32
    sent = (size - 1) * work.tokens * width * passes
    return sent / machine.link(size * work.sizes["expert"] * work.tensor)


def _experts(work: Work, machine: Machine) -> float:
    """Tokens go to all devices that share experts, and sums come back; in the backward pass the other way round."""
    size = work.sizes["expert"]
    passes = (3 if work.recomputes else 2) * (work.itemsize + _FLOAT32)
    sent = (size - 1) * work.tokens * work.spec.hidden_dim * work.spec.num_routers * passes
    return sent / machine.link(size * work.tensor)


def _shared_gradients(work: Work, machine: Machine) -> float:
    """Sums of the gradients of a microbatch over the devices that share its rows or positions."""
    part = 2 * (work.group - 1) / work.group * work.params * _FLOAT32
    return part / machine.link(work.group * work.tensor, exchange=True)
