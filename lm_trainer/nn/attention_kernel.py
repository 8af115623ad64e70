"""What every kernel that computes attention is told, and how it is described.

Shape letters: B rows, S queries, T keys, N heads, K key and value heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
from jax.typing import DTypeLike

from lm_trainer.nn.spec import AttentionSpec


class AttentionInputs(NamedTuple):
    """What attention is computed of."""

    q_BSNH: jax.Array
    """Scaled already."""
    k_BTKH: jax.Array
    """Of all positions, where devices share those of a row."""
    v_BTKH: jax.Array
    bias_BNST: jax.Array
    """float32, one head for all or each its own; it holds the mask."""
    segments_BS: jax.Array | None
    """int32, what the mask is made of together with the spec; None where the keys are those of a cache."""


class AttentionMetadata(NamedTuple):
    """Where attention is computed, and of how much."""

    platform: str
    """`cpu`, `gpu` or `tpu`."""
    dtype: DTypeLike
    """Of the values."""
    queries: int
    keys: int
    """Positions of one row."""
    cached: bool = False
    """Whether the keys are those of a cache."""

    @classmethod
    def of(cls, inputs: AttentionInputs, platform: str) -> AttentionMetadata:
        """That of these inputs."""
        q_BSNH, k_BTKH, v_BTKH, _, segments_BS = inputs
        return cls(platform, v_BTKH.dtype, q_BSNH.shape[1], k_BTKH.shape[1], segments_BS is None)


class AttentionKernel(NamedTuple):
    """One way to compute attention."""

    unsupported_reason: Callable[[AttentionSpec, AttentionMetadata], str | None]
    """What hinders it from doing what a spec says, None when it can."""
    compute: Callable[[AttentionSpec, AttentionInputs], jax.Array]
    """Attention, in the shape of the queries and the dtype of the values."""


def first_reason(reasons: Iterable[tuple[bool, str]]) -> str | None:
    """The first text whose condition holds."""
    return next((text for hinders, text in reasons if hinders), None)
