"""Time of the communication of a step, from bytes and bandwidths."""

from __future__ import annotations

from dataclasses import dataclass

from lm_trainer.nn.expert_spec import MoeSpec
from lm_trainer.nn.mixer_spec import softmax_specs
from lm_trainer.nn.spec import MlpSpec
from lm_trainer.plan.layout_work import LayoutWork
from lm_trainer.plan.machine import Machine
from lm_trainer.profile.devices import NODE, device_platform
from lm_trainer.profile.expert_kernels import expected_targets

_FLOAT32 = 4


@dataclass(frozen=True)
class Communication:
    """Time of the communication of a step in seconds, as if nothing overlapped."""

    batch: float
    """Gathering of parameters and reduction of gradients over the batch axes."""
    activations: float
    """Communication between devices that share a microbatch."""
    exposed: float
    """Part of `batch` that no computation can hide: the first gather and the last reduction."""


def communication(work: LayoutWork, machine: Machine) -> Communication:
    """Returns the time of the communication of a step."""
    batch = _batch_axes_seconds(work, machine)
    shared = _tensor_parallel_seconds(work, machine) + _context_parallel_seconds(work, machine)
    shared += _expert_parallel_seconds(work, machine) + _gradient_sum_seconds(work, machine)
    return Communication(batch, work.microbatches * shared, batch / max(1, len(work.spec.blocks)))


def _batch_axes_seconds(work: LayoutWork, machine: Machine) -> float:
    """Returns the time of gathering parameters and summing gradients."""
    if work.shards == 1:
        return 0.0
    part = (work.shards - 1) / work.shards * work.params
    if work.layerwise:
        gathered, reduced = 2 * work.gathers * work.itemsize, work.gathers * work.exchanged_itemsize
    elif not work.trainer.bitwise:
        gathered, reduced = 2 * work.microbatches * work.itemsize, work.microbatches * work.itemsize
    else:
        gathered, reduced = _FLOAT32, _FLOAT32
    stride = work.devices // work.shards
    ring = machine.link_bandwidth(work.shards, stride)
    exchange = machine.link_bandwidth(work.shards, stride, exchange=True)
    return part * gathered / ring + part * reduced / (exchange if _exchanges_between_all(work, machine) else ring)


def gather_seconds(work: LayoutWork, machine: Machine) -> float:
    """Returns the time of gathering the layers for one more microbatch, forward and backward; 0 if all parameters are
    gathered for the whole step.
    """
    if not work.layerwise or work.shards == 1:
        return 0.0
    gathered = 2 * work.itemsize * work.params * (work.shards - 1) / work.shards
    return gathered / machine.link_bandwidth(work.shards, work.devices // work.shards)


def _exchanges_between_all(work: LayoutWork, machine: Machine) -> bool:
    """Returns True if gradients are added in one exchange between all devices.

    With a power of two of nodes of GPUs, each node first adds its gradients, so an adapter sends an eighth of the
    bytes, as in a ring.
    """
    nodes = -(-work.devices // NODE)
    in_two_stages = device_platform(machine.kind) == "gpu" and nodes & (nodes - 1) == 0
    return work.trainer.bitwise and not in_two_stages


def _tensor_parallel_seconds(work: LayoutWork, machine: Machine) -> float:
    """Returns the time of activation sums after attention and MLP: forward, backward, and once more if recomputed."""
    if work.tensor == 1:
        return 0.0
    ring = 2 * (work.tensor - 1) / work.tensor
    sums = 2 * (3 if work.recomputation.products else 2) * len(work.spec.all_blocks)
    sent = ring * work.tokens * work.spec.hidden_dim * work.itemsize
    return sums * (sent / machine.link_bandwidth(work.tensor) + machine.efficiency.latency)


def _context_parallel_seconds(work: LayoutWork, machine: Machine) -> float:
    """Returns the time of sending keys and values, and their gradients in float32."""
    size = work.sizes["context"]
    attentions = softmax_specs(work.spec.all_blocks)
    width = sum(spec.kv_heads * (spec.head_dim + spec.value_size) for spec in attentions) / work.tensor
    passes = (2 if work.recomputes else 1) * work.itemsize + _FLOAT32
    sent = (size - 1) * work.tokens * width * passes
    return sent / machine.link_bandwidth(size, work.sizes["expert"] * work.tensor)


def _expert_parallel_seconds(work: LayoutWork, machine: Machine) -> float:
    """Returns the time of sending tokens to the devices of their experts, and the results back; twice."""
    size = work.sizes["expert"]
    sent = work.tokens * sum(_exchanged_bytes(block.mlp, work) for block in work.spec.all_blocks)
    return sent / machine.link_bandwidth(size, work.tensor, exchange=True)


def _exchanged_bytes(mlp: MlpSpec | MoeSpec | None, work: LayoutWork) -> float:
    """Returns the bytes that a device sends for each of its tokens, for the experts of a layer."""
    size = work.sizes["expert"]
    if size == 1 or not isinstance(mlp, MoeSpec):
        return 0.0
    # Tokens and gradients of results go out, results and gradients of tokens come back. Results are not needed again.
    passes = 4 + (1 if work.recomputes else 0)
    rows = expected_targets(mlp, size) * (size - 1) / size * work.spec.hidden_dim * work.itemsize * passes
    # All devices receive the experts and weights of all tokens, as 4 bytes each, and return gradients of the weights.
    choices = (size - 1) * mlp.top_k * _FLOAT32 * (2 * (2 if work.recomputes else 1) + 1)
    return rows + choices


def _gradient_sum_seconds(work: LayoutWork, machine: Machine) -> float:
    """Returns the time of summing a microbatch's gradients over the devices that share its rows or positions."""
    part = 2 * (work.group - 1) / work.group * work.params * _FLOAT32
    return part / machine.link_bandwidth(work.group, work.tensor, exchange=True)
