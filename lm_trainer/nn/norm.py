"""Normalization.

Shape letters: D hidden dimension; `...` any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from lm_trainer.nn.init import Init
from lm_trainer.nn.spec import NormSpec


class LayerNorm(nnx.Module):
    """Layer normalization (Ba et al. 2016), computed in float32 and returned in the dtype of its input."""

    def __init__(self, spec: NormSpec, dim: int, *, init: Init):
        self.eps = spec.eps
        self.scale = init.constant({"embed": dim}, 1.0)
        self.bias = init.constant({"embed": dim}, 0.0) if spec.bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        y = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.eps)
        y = y * self.scale[...].astype(jnp.float32)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


def identity(x: jax.Array) -> jax.Array:
    """What stands where a norm is absent."""
    return x


def make_norm(spec: NormSpec | None, dim: int, *, init: Init) -> Callable[[jax.Array], jax.Array]:
    """The norm of `spec`; the identity for None."""
    return identity if spec is None else LayerNorm(spec, dim, init=init)
