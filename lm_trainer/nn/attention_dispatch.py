"""Attention dispatch: selects an attention backend and calls it.

Shape letters: B rows, S queries, T keys, N heads, K key and value heads, H head size.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import NamedTuple

import jax
from jax.typing import DTypeLike

from lm_trainer.core.errors import UserError
from lm_trainer.nn import cudnn_attention, ring_layout
from lm_trainer.nn.attention_kernel import (
    AttentionInputs,
    AttentionMetadata,
    is_differentiating_twice,
    is_summing_in_fixed_order,
)
from lm_trainer.nn.mixer_spec import softmax_specs
from lm_trainer.nn.spec import AttentionSpec, BlockSpec
from lm_trainer.nn.splash_attention import SPLASH
from lm_trainer.nn.xla_attention import xla_attention
from lm_trainer.parallel.collectives import all_gather, axis_size
from lm_trainer.parallel.target_platform import compilation_target

logger = logging.getLogger(__name__)

_KERNELS = {"cudnn": cudnn_attention.CUDNN, "splash": SPLASH}
_REASONS = {name: kernel.unsupported_reason for name, kernel in _KERNELS.items()} | {
    "ring": ring_layout.unsupported_reason
}

_NO_KERNEL = "the platform has no fused kernel"
_MAX_PAIR_BYTES = 8 * 2**30
"""Maximum size, in bytes, of arrays over query-key pairs for which `auto` gathers the keys of a row."""


class BackendChoice(NamedTuple):
    """An attention backend and the reason for selecting it."""

    backend: str
    reason: str


def choose_backend(spec: AttentionSpec, metadata: AttentionMetadata) -> BackendChoice:
    """Selects a backend that supports `spec`.

    A backend requested by the spec applies to self-attention. If the requested backend cannot decode, decoding uses
    xla, so every model can generate text on any platform. If devices share the positions of a row, `auto` selects ring
    attention when the arrays over all pairs of their queries and the row's keys would be large, and no kernel is needed
    otherwise. On one device, it selects ring attention, which computes blocks, when the arrays of its kernel would be.

    Raises:
        UserError: if the spec requests a backend that does not support it.
    """
    requested = spec.scores.backend
    if requested == "xla":
        return BackendChoice("xla", "asked for")
    available = [name for name, kernel in _KERNELS.items() if metadata.platform in kernel.platforms]
    candidates = available if requested == "auto" else [requested]
    reasons = {name: _REASONS[name](spec, metadata) for name in candidates}
    supported = next((name for name, reason in reasons.items() if reason is None), None)
    reason = "; ".join(f"{name} cannot be used: {reason}" for name, reason in reasons.items()) or _NO_KERNEL
    too_large = "cudnn" in reasons and supported is None and cudnn_attention.is_workspace_too_large(spec, metadata)
    if requested == "auto" and (metadata.devices > 1 or too_large):
        return _choose_for_long_rows(spec, metadata, supported, reason)
    if supported is not None:
        return BackendChoice(supported, "asked for" if supported == requested else "can do all that the model asks for")
    # Never falls back silently: a kernel requested for training is either used or rejected with an error.
    if requested != "auto" and not metadata.cached:
        raise UserError(f"attn_backend: {reason}; write xla, or auto to let it be chosen")
    return BackendChoice("xla", reason)


def _choose_for_long_rows(
    spec: AttentionSpec, metadata: AttentionMetadata, kernel: str | None, no_kernel_reason: str
) -> BackendChoice:
    # Bytes per row, so the result depends neither on the microbatch size nor on the number of devices that share a
    # batch.
    pairs = metadata.queries * metadata.keys
    # Kernels read only the mask, in float32 and in the compute dtype; xla also stores the scores and their gradient.
    pairs_at_once = min(spec.scores.block_size or metadata.queries, metadata.queries) * metadata.keys
    size = 6 * pairs if kernel else 4 * pairs + 2 * 4 * spec.num_heads * pairs_at_once
    size_note = (
        f"{'all' if metadata.devices == 1 else 'gathering all'} keys takes arrays of {size / 2**30:.3g} GiB for "
        f"{metadata.queries} x {metadata.keys} pairs"
    )
    obstacle = ring_layout.unsupported_reason(spec, metadata)
    if size > _MAX_PAIR_BYTES and obstacle is None:
        return BackendChoice("ring", size_note if metadata.devices > 1 else f"{no_kernel_reason}; {size_note}")
    if size > _MAX_PAIR_BYTES:
        size_note = f"{size_note}, but ring cannot be used: {obstacle}"
    return BackendChoice(kernel or "xla", size_note if kernel else f"{no_kernel_reason}; {size_note}")


def uses_ring(blocks: Iterable[BlockSpec], dtype: DTypeLike, queries: int) -> bool:
    """Returns true if a model computes attention with `ring_attention`; its layers then use the layout of the ring.

    Args:
        blocks: the model's layers. They share the layout: if one of them uses a ring, all do.
        dtype: dtype of the values.
        queries: number of positions of a row on this device.

    Raises:
        UserError: as `choose_backend`.
    """
    metadata = _describe_call(dtype, queries, queries * axis_size("context"))
    choices = {spec: choose_backend(spec, metadata) for spec in softmax_specs(blocks)}
    rings = [choice for choice in choices.values() if choice.backend == "ring"]
    for choice in rings:
        if choice.reason != "asked for":
            _log_backend(choice)
    return bool(rings)


def _describe_call(dtype: DTypeLike, queries: int, keys: int, *, cached: bool = False) -> AttentionMetadata:
    """Describes an attention call in the program that is being traced."""
    target = compilation_target()
    return AttentionMetadata(
        target.platform,
        dtype,
        queries,
        keys,
        cached,
        is_differentiating_twice(),
        cudnn_attention.device_unsupported_reason(),
        target.gpu_generation,
        is_summing_in_fixed_order(),
    )


def check_backends(blocks: Iterable[BlockSpec], metadata: AttentionMetadata) -> None:
    """Selects a backend for the attention of every layer, without computing anything.

    Raises:
        UserError: as `choose_backend`.
    """
    for attention in dict.fromkeys(softmax_specs(blocks)):
        choose_backend(attention, metadata)


# Cached so that each choice is logged once; the function is called for every layer of every traced program.
@functools.cache
def _log_backend(choice: BackendChoice) -> None:
    logger.info("attention is computed by %s: %s", choice.backend, choice.reason)


def dispatch_attention(  # noqa: PLR0913 - the arguments of attention
    spec: AttentionSpec,
    q_BSNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    bias_BNST: jax.Array,
    *,
    segments_BS: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """Computes softmax(q k^T + bias) v with the selected backend, [B, S, N, H] in the dtype of v.

    For ring attention (`uses_ring`), which takes no bias, call `ring_attention` instead.

    Args:
        spec: the attention spec.
        q_BSNH: queries, already scaled.
        k_BTKH: keys; if devices share the positions of a row, the keys of this device.
        v_BTKH: values, likewise. With the xla backend, value vectors may differ in size from key vectors; the result
            then has the size of the value vectors.
        bias_BNST: float32; contains the mask. May have a single head, which then applies to all heads.
        segments_BS: int32; the segments from which the mask of self-attention was built; None with a cache.
        sinks_N: logits of the sinks, if the spec has sinks.
        key: for dropout of the probabilities; None disables it.

    Raises:
        UserError: as `choose_backend`.
    """
    # A layer that computes no sinks must not drop the sinks of its spec.
    assert spec.sinks == (sinks_N is not None)
    # A query attends to keys of the full row, so devices that share the positions of a row gather its keys and values.
    k_BTKH, v_BTKH = all_gather(k_BTKH, "context", 1), all_gather(v_BTKH, "context", 1)
    inputs = AttentionInputs(q_BSNH, k_BTKH, v_BTKH, bias_BNST, segments_BS, sinks_N)
    choice = choose_backend(
        spec, _describe_call(v_BTKH.dtype, q_BSNH.shape[1], k_BTKH.shape[1], cached=segments_BS is None)
    )
    assert choice.backend != "ring"
    # If no other choice was possible, there is nothing to log.
    if choice.backend != spec.scores.backend and choice.reason != _NO_KERNEL:
        _log_backend(choice)
    if choice.backend in _KERNELS:
        return _KERNELS[choice.backend].compute(spec, inputs)
    return xla_attention(spec, inputs, key)
