"""Expected time of a step on a layout, by formula: products, attention, memory traffic and communication.

Each part takes its FLOPs or bytes at the rate of the datasheet times a measured efficiency
(`lm_trainer.profile.efficiency`). Overlap follows one rule, see `_hidden_seconds`. Nothing is compiled.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from lm_trainer.nn.mixer_spec import softmax_spec, softmax_specs
from lm_trainer.nn.spec import AttentionSpec
from lm_trainer.plan.communication import Communication, communication
from lm_trainer.plan.layout_work import LayoutWork
from lm_trainer.plan.machine import Machine
from lm_trainer.plan.memory_traffic import exchange_bytes, microbatch_bytes, update_bytes, weight_bytes
from lm_trainer.profile.attention_kernels import computed_share, kernel_block, visible_share
from lm_trainer.profile.devices import device_platform
from lm_trainer.profile.efficiency import Efficiency
from lm_trainer.profile.expert_kernels import unneeded_expert_flops
from lm_trainer.profile.flops import flops_per_token, ring_score_fraction
from lm_trainer.profile.mixer_flops import count_mixer

_BACKWARD_PRODUCTS = 5 / 2
"""Products of queries and keys in the backward pass of an attention kernel, relative to its forward pass."""
_PERFECT = Efficiency(products=1, attention_forward=1, attention_backward=1, memory=1, links=1)


@dataclass(frozen=True)
class StepCost:
    """Time of a step on the busiest device in seconds, divided into parts."""

    compute: float
    """Products with weights."""
    attention: float
    """Products of queries, keys and values."""
    recompute: float
    """Products with weights and attention that are computed again in the backward pass."""
    memory: float
    """Memory traffic of elementwise operations, parameters, gradients, scores and the optimizer."""
    network: float
    """Communication of parameters, gradients and activations."""
    hidden: float
    """Part of `network` that overlaps with computation, minus the time by which it slows down the computation."""
    idle: float
    """Waiting for devices that have more microbatches, or for other pipeline stages."""

    @property
    def seconds(self) -> float:
        """Expected time of the step."""
        return self.compute + self.attention + self.recompute + self.memory + self.network - self.hidden + self.idle


def step_cost(work: LayoutWork, machine: Machine) -> StepCost:
    """Returns the expected time of a training step on a layout."""
    compute, repeated_products = _product_seconds(work, machine)
    attention, repeated_attention = _attention_seconds(work, machine)
    recompute = repeated_products + repeated_attention
    even = work.even_microbatches
    memory = work.microbatches * microbatch_bytes(work, machine.kind) + exchange_bytes(work) + update_bytes(work)
    sent = communication(work, machine)
    busy = even * (compute + attention + recompute) + memory / machine.memory_rate
    return StepCost(
        compute=even * compute,
        attention=even * attention,
        recompute=even * recompute,
        memory=memory / machine.memory_rate,
        network=sent.batch + sent.activations,
        hidden=_hidden_seconds(work, sent, busy) * (1 - machine.efficiency.overlap_slowdown),
        # The busiest device has an integer number of microbatches.
        idle=(work.microbatches - even + work.microbatches * _bubble(work)) * (compute + attention + recompute),
    )


def microbatch_seconds(work: LayoutWork, machine: Machine) -> float:
    """Returns the time of one microbatch on a device, without the gathering of parameters over the batch axes."""
    busy = sum(map(sum, (_product_seconds(work, machine), _attention_seconds(work, machine))))
    traffic = microbatch_bytes(work, machine.kind) / machine.memory_rate
    return (1 + _bubble(work)) * busy + traffic + communication(work, machine).activations / work.microbatches


def _bubble(work: LayoutWork) -> float:
    """Returns the time that a device of a pipeline waits for other stages, relative to the time of its computation."""
    return (work.sizes["pipeline"] - 1) / work.plan.rows


def step_bound(work: LayoutWork, machine: Machine) -> float:
    """Returns a lower bound of the time of a training step on a layout, in seconds.

    Products, memory traffic and communication each take the rates of the datasheet, and the two faster ones are hidden
    behind the slowest.
    """
    perfect = step_cost(work, replace(machine, efficiency=_PERFECT))
    return max(perfect.compute + perfect.attention + perfect.recompute, perfect.memory, perfect.network)


def _product_seconds(work: LayoutWork, machine: Machine) -> tuple[float, float]:
    """Returns the time of the products with weights of one microbatch: as the model needs them, and recomputed."""
    count = flops_per_token(work.spec, work.seq_len)
    scores = count.attention_product + count.attention_softmax
    forward = count.forward - scores
    divided = (forward - count.head) / work.tensor + count.head / work.head_shards
    # The FLOPs of a step contain three times the scores, also if only adapters are trained.
    training = (work.training_flops - 3 * scores) * divided / forward
    unneeded = unneeded_expert_flops(work.spec, device_platform(machine.kind), work.tokens, work.sizes["expert"])
    training += unneeded / work.tensor
    repeated = work.recomputation.products / work.tensor
    # Products of few tokens wait for their weights.
    needed = max(work.tokens * training / machine.product_rate, weight_bytes(work) / machine.memory_rate)
    return needed, work.tokens * repeated / machine.product_rate


def _attention_seconds(work: LayoutWork, machine: Machine) -> tuple[float, float]:
    """Returns the time of the attention of one microbatch: forward and backward, and the repeated forward pass."""
    total, repeated = 0.0, 0.0
    for spec, layers in Counter(softmax_specs(work.spec.all_blocks)).items():
        width = layers * spec.num_heads * (spec.head_dim + spec.value_size) / work.tensor
        forward = work.tokens * 2 * work.seq_len * width * _computed_share(spec, work, machine)
        if work.has_kernel:
            first = forward / machine.attention_rate(spec.head_dim, backward=False)
            second = _BACKWARD_PRODUCTS * forward / machine.attention_rate(spec.head_dim, backward=True)
        else:
            first, second = forward / machine.product_rate, 2 * forward / machine.product_rate
        total += first + second
        repeated += first * work.recomputation.attention
        if work.measures_logits:
            # A second product of all queries and keys, outside the kernel.
            logits = layers * spec.num_heads * spec.head_dim / work.tensor
            total += work.tokens * 2 * work.seq_len * logits / machine.product_rate
    # Mixers without a softmax have no kernel: their products are products of matrices.
    products = sum(
        count_mixer(block.mixer, work.spec.hidden_dim, work.seq_len).product
        for block in work.spec.all_blocks
        if softmax_spec(block.mixer) is None
    )
    forward = work.tokens * products / work.tensor / machine.product_rate
    return total + 3 * forward, repeated + forward * work.recomputation.attention


def _computed_share(spec: AttentionSpec, work: LayoutWork, machine: Machine) -> float:
    """Returns the share of pairs whose scores are computed.

    Efficiencies of kernels on GPUs count the pairs that the mask leaves; on TPUs, blocks are counted whole.
    """
    if work.backend == "ring":
        return ring_score_fraction(work.spec, work.seq_len, work.sizes["context"])
    if not work.has_kernel:
        return 1.0
    if device_platform(machine.kind) != "tpu":
        return visible_share(spec, work.seq_len)
    return computed_share(spec, work.seq_len, kernel_block(spec, work.seq_len, machine.kind))


def _hidden_seconds(work: LayoutWork, sent: Communication, busy: float) -> float:
    """Returns the time of communication that overlaps with computation.

    With `determinism: fast`, gathers and reductions overlap with all computation, except the first gather and the last
    reduction. With `gather: layer`, they overlap with the first microbatch of each group, whose program contains them.
    With `gather: model`, they are separate programs. Communication of activations is never hidden.
    """
    if work.layerwise:
        return work.overlap * min(busy * work.gathers / work.microbatches, sent.batch - sent.exposed)
    if work.trainer.bitwise:
        return 0.0
    return min(busy, sent.batch - sent.exposed)
