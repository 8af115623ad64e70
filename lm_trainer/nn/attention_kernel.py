"""Inputs and description of the kernels that compute attention.

Shape letters: B rows, S queries, T keys, N heads, K key and value heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

import jax
from jax.typing import DTypeLike

from lm_trainer.nn.spec import AttentionSpec

# Fraction of the largest float32; 0.7 leaves room to add the score and the ALiBi bias without overflow.
MASK_VALUE = -0.7 * 3.4028234663852886e38
"""Score of a masked pair, or the bias added to it: finite, to avoid differences of infinities."""


NO_SECOND_DERIVATIVE = "its gradient has no derivative, which sophia-h takes (sophia-g does not)"
"""Reason for which a kernel cannot be differentiated twice."""
RESIDUAL = "attention_kernel"
"""Name, for `jax.checkpoint`, of a kernel's results that its gradient reads."""

# One value per thread; JAX includes it in the cache keys of traced functions.
_second_derivative = jax.make_user_context(False)


def differentiating_twice() -> AbstractContextManager[None]:
    """Makes models traced in this thread choose attention with a differentiable gradient."""
    return _second_derivative(True)


def is_differentiating_twice() -> bool:
    """True inside of `differentiating_twice`."""
    return _second_derivative.value


class AttentionInputs(NamedTuple):
    """Operands of attention."""

    q_BSNH: jax.Array
    """Queries, already scaled."""
    k_BTKH: jax.Array
    """Keys of the full row, also if devices share its positions."""
    v_BTKH: jax.Array
    bias_BNST: jax.Array
    """float32, with one head for all or one per head; contains the mask."""
    segments_BS: jax.Array | None
    """int32, define the mask together with the spec; None with a KV cache."""


class AttentionMetadata(NamedTuple):
    """Platform, dtype and sizes of an attention call."""

    platform: str
    """`cpu`, `gpu` or `tpu`."""
    dtype: DTypeLike
    """Dtype of the values."""
    queries: int
    keys: int
    """Positions of one row."""
    cached: bool = False
    """True if the keys come from a cache."""
    second_derivative: bool = False
    """True if the gradient is differentiated a second time."""
    device_lacks: str | None = None
    """Reason why the device has no fused kernel at all; None if it may have one."""

    @property
    def devices(self) -> int:
        """Number of devices that share the positions of a row, if the keys belong to the queries' row."""
        return 1 if self.cached else self.keys // self.queries


class AttentionKernel(NamedTuple):
    """One implementation of attention."""

    platforms: Collection[str]
    """Platforms it runs on."""
    unsupported_reason: Callable[[AttentionSpec, AttentionMetadata], str | None]
    """Returns the reason why it cannot compute a spec; None if it can."""
    compute: Callable[[AttentionSpec, AttentionInputs], jax.Array]
    """Computes attention in the shape of the queries and the dtype of the values."""


def first_reason(reasons: Iterable[tuple[bool, str]]) -> str | None:
    """Returns the first text whose condition is true."""
    return next((text for applies, text in reasons if applies), None)
