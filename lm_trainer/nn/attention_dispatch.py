"""Attention dispatch: the choice of a backend for queries, keys and values, and the call of it.

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
from lm_trainer.nn.attention_kernel import AttentionInputs, AttentionMetadata, is_differentiated_twice
from lm_trainer.nn.spec import AttentionSpec, BlockSpec
from lm_trainer.nn.splash_attention import SPLASH
from lm_trainer.nn.xla_attention import xla_attention
from lm_trainer.parallel.collectives import all_gather, axis_size
from lm_trainer.parallel.target_platform import target_platform

logger = logging.getLogger(__name__)

_KERNELS = {"cudnn": cudnn_attention.CUDNN, "splash": SPLASH}
_REASONS = {name: kernel.unsupported_reason for name, kernel in _KERNELS.items()} | {
    "ring": ring_layout.unsupported_reason
}

_NO_KERNEL = "the platform has no fused kernel"
_MOST_FOR_PAIRS = 8 * 2**30
"""Bytes of arrays of pairs of a query and a key up to which `auto` gathers the keys of a row."""


class BackendChoice(NamedTuple):
    """A backend of attention and the reason for it."""

    backend: str
    reason: str


def choose_backend(spec: AttentionSpec, metadata: AttentionMetadata) -> BackendChoice:
    """Chooses the backend for `spec` among those that support it.

    A backend that the spec demands is for rows that attend to themselves: where it cannot decode, xla does, so that
    text can be generated with every model, on any platform. With `auto`, devices that share the positions of a row take
    a ring where arrays of all pairs of their queries and the row's keys would be large, and no kernel where they are
    not needed.

    Raises:
        UserError: when the spec demands a backend that does not support it.
    """
    wanted = spec.scores.backend
    if wanted == "xla":
        return BackendChoice("xla", "asked for")
    of_platform = [name for name, kernel in _KERNELS.items() if metadata.platform in kernel.platforms]
    names = of_platform if wanted == "auto" else [wanted]
    reasons = {name: _REASONS[name](spec, metadata) for name in names}
    able = next((name for name, reason in reasons.items() if reason is None), None)
    reason = "; ".join(f"{name} cannot be used: {reason}" for name, reason in reasons.items()) or _NO_KERNEL
    if wanted == "auto" and metadata.devices > 1:
        return _with_shared_positions(spec, metadata, able, reason)
    if able is not None:
        return BackendChoice(able, "asked for" if able == wanted else "can do all that the model asks for")
    # A fallback is announced or does not happen: who demands a kernel for training gets it or an error.
    if wanted != "auto" and not metadata.cached:
        raise UserError(f"attn_backend: {reason}; write xla, or auto to let it be chosen")
    return BackendChoice("xla", reason)


def _with_shared_positions(
    spec: AttentionSpec, metadata: AttentionMetadata, kernel: str | None, why_no_kernel: str
) -> BackendChoice:
    # The size is that of one row, so that it depends neither on the microbatch nor on the devices that share a batch.
    pairs = metadata.queries * metadata.keys
    # Kernels read the mask alone, float32 and once more in the compute dtype; xla holds scores and their gradient too.
    held = min(spec.scores.block_size or metadata.queries, metadata.queries) * metadata.keys
    size = 6 * pairs if kernel else 4 * pairs + 2 * 4 * spec.num_heads * held
    said = f"gathering all keys takes arrays of {size / 2**30:.3g} GiB for {metadata.queries} x {metadata.keys} pairs"
    hinders = ring_layout.unsupported_reason(spec, metadata)
    if size > _MOST_FOR_PAIRS and hinders is None:
        return BackendChoice("ring", said)
    if size > _MOST_FOR_PAIRS:
        said = f"{said}, but ring cannot be used: {hinders}"
    return BackendChoice(kernel or "xla", said if kernel else f"{why_no_kernel}; {said}")


def uses_ring(blocks: Iterable[BlockSpec], dtype: DTypeLike, queries: int) -> bool:
    """True if the attention of a model is computed by `ring_attention`, in whose layout its layers then are.

    Args:
        blocks: its layers, which share the layout: where one of them takes a ring, all do.
        dtype: of the values.
        queries: positions of a row on this device.

    Raises:
        UserError: as `choose_backend`.
    """
    metadata = _site(dtype, queries, queries * axis_size("context"))
    choices = {block.attention: choose_backend(block.attention, metadata) for block in blocks}
    rings = [choice for choice in choices.values() if choice.backend == "ring"]
    for choice in rings:
        if choice.reason != "asked for":
            _announce(choice)
    return bool(rings)


def _site(dtype: DTypeLike, queries: int, keys: int, *, cached: bool = False) -> AttentionMetadata:
    """The metadata of attention in the program that is being traced."""
    return AttentionMetadata(
        target_platform(), dtype, queries, keys, cached, is_differentiated_twice(), cudnn_attention.device_lacks()
    )


def check_backends(blocks: Iterable[BlockSpec], metadata: AttentionMetadata) -> None:
    """Finds a backend for the attention of every layer, without computing anything.

    Raises:
        UserError: as `choose_backend`.
    """
    for attention in dict.fromkeys(block.attention for block in blocks):
        choose_backend(attention, metadata)


# Cached: every layer of every traced program asks, and each choice is worth one line in the log.
@functools.cache
def _announce(choice: BackendChoice) -> None:
    logger.info("attention is computed by %s: %s", choice.backend, choice.reason)


def dispatch_attention(  # noqa: PLR0913 - the arguments of attention
    spec: AttentionSpec,
    q_BSNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    bias_BNST: jax.Array,
    *,
    segments_BS: jax.Array | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """Computes softmax(q k^T + bias) v by the chosen backend, [B, S, N, H] in the dtype of v.

    Where attention goes round a ring (`uses_ring`), which reads no bias, call `ring_attention` instead.

    Args:
        spec: of the attention.
        q_BSNH: queries, scaled already.
        k_BTKH: keys; where devices share the positions of a row, those of this device.
        v_BTKH: values likewise. With the backend xla their vectors may have another size than those of keys, and those
            of the result have it too.
        bias_BNST: float32, may have one head for all, and holds the mask.
        segments_BS: int32, from which the mask was made, for rows that attend to themselves; None with a cache.
        key: for the dropout of probabilities; None switches it off.

    Raises:
        UserError: as `choose_backend`.
    """
    # A query attends to keys of the whole row, so devices that share its positions bring theirs together.
    k_BTKH, v_BTKH = all_gather(k_BTKH, "context", 1), all_gather(v_BTKH, "context", 1)
    inputs = AttentionInputs(q_BSNH, k_BTKH, v_BTKH, bias_BNST, segments_BS)
    choice = choose_backend(spec, _site(v_BTKH.dtype, q_BSNH.shape[1], k_BTKH.shape[1], cached=segments_BS is None))
    assert choice.backend != "ring"
    # Where nothing else could be chosen, there is nothing to tell.
    if choice.backend != spec.scores.backend and choice.reason != _NO_KERNEL:
        _announce(choice)
    if choice.backend in _KERNELS:
        return _KERNELS[choice.backend].compute(spec, inputs)
    return xla_attention(spec, inputs, key)
