"""Inputs and description of the kernels that compute attention.

Shape letters: B rows, S queries, T keys, N heads, K key and value heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.typing import DTypeLike

from lm_trainer.nn.spec import AttentionSpec

# Of the largest float32; 0.7 leaves room for the score and the bias of ALiBi, which are added and must not overflow.
MASK_VALUE = -0.7 * 3.4028234663852886e38
"""The score of a pair that may not attend, or what is added to it: finite, so that no difference of infinities
arises."""


NO_SECOND_DERIVATIVE = "its gradient has no derivative, which sophia-h takes (sophia-g does not)"
"""The reason why a kernel cannot be differentiated twice."""
RESIDUAL = "attention_kernel"
"""The name, for `jax.checkpoint`, of what a kernel returns and its gradient reads."""

# Of each thread by itself; JAX counts it into the keys of its caches of traced functions.
_twice = jax.make_user_context(False)


def differentiated_twice() -> AbstractContextManager[Any]:
    """Has models that this thread traces choose attention whose gradient can be differentiated."""
    return _twice(True)


def is_differentiated_twice() -> bool:
    """True inside of `differentiated_twice`."""
    return _twice.value


class AttentionInputs(NamedTuple):
    """Operands of attention."""

    q_BSNH: jax.Array
    """Queries, scaled already."""
    k_BTKH: jax.Array
    """Keys of the whole row, also where devices share its positions."""
    v_BTKH: jax.Array
    bias_BNST: jax.Array
    """float32, one head for all or each its own; it holds the mask."""
    segments_BS: jax.Array | None
    """int32, which give the mask together with the spec; None where the keys are those of a cache."""


class AttentionMetadata(NamedTuple):
    """Platform, dtype and sizes of one computation of attention."""

    platform: str
    """`cpu`, `gpu` or `tpu`."""
    dtype: DTypeLike
    """The dtype of the values."""
    queries: int
    keys: int
    """Positions of one row."""
    cached: bool = False
    """True if the keys are those of a cache."""
    twice: bool = False
    """True if the gradient is differentiated once more."""
    device_lacks: str | None = None
    """The reason why the device has no fused kernel, whatever is asked of it; None where it may have one."""

    @property
    def devices(self) -> int:
        """Devices that share the positions of a row, where the keys are those of the queries' row."""
        return 1 if self.cached else self.keys // self.queries


class AttentionKernel(NamedTuple):
    """One way to compute attention."""

    platforms: Collection[str]
    """Those that it is for."""
    unsupported_reason: Callable[[AttentionSpec, AttentionMetadata], str | None]
    """Gives the reason why it cannot do what a spec says; None when it can."""
    compute: Callable[[AttentionSpec, AttentionInputs], jax.Array]
    """Computes attention in the shape of the queries and the dtype of the values."""


def first_reason(reasons: Iterable[tuple[bool, str]]) -> str | None:
    """The first text whose condition holds."""
    return next((text for hinders, text in reasons if hinders), None)
