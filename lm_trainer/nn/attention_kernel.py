"""Interface of the kernels that compute attention: their inputs and descriptions.

Shape letters: B rows, S queries, T keys, N heads, K key and value heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

import jax
from jax.typing import DTypeLike

from lm_trainer.nn.spec import AttentionSpec

# Fraction of the largest float32 number; 0.7 leaves room to add the score and the ALiBi bias without overflow.
MASK_VALUE = -0.7 * 3.4028234663852886e38
"""Score of a masked pair, or the bias added to it. Finite, because differences of infinities are NaN."""


NO_SECOND_DERIVATIVE = "its gradient has no derivative, which sophia-h takes (sophia-g does not)"
"""Reason why a kernel cannot be differentiated twice."""
RESIDUAL = "attention_kernel"
"""Name, for `jax.checkpoint`, of the results of a kernel that its gradient reads."""

# One value per thread. JAX includes them in the cache keys of traced functions.
_second_derivative = jax.make_user_context(False)
_fixed_order = jax.make_user_context(False)


def differentiating_twice() -> AbstractContextManager[None]:
    """Makes models traced in this thread select an attention backend whose gradient is differentiable."""
    return _second_derivative(True)


def is_differentiating_twice() -> bool:
    """Returns true inside a `differentiating_twice` context."""
    return _second_derivative.value


def summing_in_fixed_order(fixed: bool) -> AbstractContextManager[None]:
    """Tells models traced in this thread whether their gradients must be summed in a fixed order."""
    return _fixed_order(fixed)


def is_summing_in_fixed_order() -> bool:
    """Returns true inside a `summing_in_fixed_order(True)` context."""
    return _fixed_order.value


class AttentionInputs(NamedTuple):
    """Inputs of an attention kernel."""

    q_BSNH: jax.Array
    """Queries, already scaled."""
    k_BTKH: jax.Array
    """Keys of the full row, even if devices share its positions."""
    v_BTKH: jax.Array
    bias_BNST: jax.Array
    """float32; contains the mask. Has one head for all heads of the queries, or one for each."""
    segments_BS: jax.Array | None
    """int32; determine the mask together with the spec. None with a KV cache."""
    sinks_N: jax.Array | None = None
    """float32; logit of the sink of each head. None if the spec has no sinks."""


class AttentionMetadata(NamedTuple):
    """Platform, dtype and sizes of an attention call."""

    platform: str
    """`cpu`, `gpu` or `tpu`."""
    dtype: DTypeLike
    """Dtype of the value vectors."""
    queries: int
    keys: int
    """Number of query positions of one row."""
    cached: bool = False
    """True if the keys come from a KV cache."""
    second_derivative: bool = False
    """True if the gradient of the attention is differentiated a second time."""
    device_lacks: str | None = None
    """Reason why the device has no fused attention kernel at all; None if it may have one."""
    gpu_generation: int | None = None
    """Major version of the compute capability of an NVIDIA GPU; None if it is unknown."""
    fixed_order: bool = False
    """True if the gradient must be summed in a fixed order, so that its bits are the same in every run."""

    @property
    def devices(self) -> int:
        """Number of devices that share the positions of a row, if the keys belong to the queries' row."""
        return 1 if self.cached else self.keys // self.queries


class AttentionKernel(NamedTuple):
    """One implementation of attention."""

    platforms: Collection[str]
    """Platforms that the kernel runs on."""
    unsupported_reason: Callable[[AttentionSpec, AttentionMetadata], str | None]
    """Returns the reason why the kernel cannot compute a spec; None if it can."""
    compute: Callable[[AttentionSpec, AttentionInputs], jax.Array]
    """Computes attention; the result has the shape of the queries and the dtype of the values."""


def first_reason(reasons: Iterable[tuple[bool, str]]) -> str | None:
    """Returns the first reason whose condition is true."""
    return next((text for applies, text in reasons if applies), None)
