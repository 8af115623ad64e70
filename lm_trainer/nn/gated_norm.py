"""Normalization of the result of a recurrence, combined with a gate.

Shape letters: B rows, S positions, N heads, P size of a head, W their product, Q groups.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from lm_trainer.core.broadcast import with_rank_of
from lm_trainer.nn.init import Initializer
from lm_trainer.nn.read import read
from lm_trainer.nn.spec import NormSpec


class GatedNorm(nnx.Module):
    """RMS normalization of groups of dimensions, and a product with SiLU of a gate before it or after it.

    Args:
        spec: a norm without bias, of kind `rms`.
        width: number of dimensions that have a gain: of all heads, or of one head, if heads share their gains.
        groups: number of groups into which these dimensions are divided, each normalized separately.
        gate_first: multiply by the gate before the normalization.
        init: makes the gains.
    """

    def __init__(self, spec: NormSpec, *, width: int, groups: int, gate_first: bool, init: Initializer):
        self.spec, self.groups, self.gate_first = spec, groups, gate_first
        self.scale = init.constant({"mlp": width}, 1.0)

    def __call__(self, x_BSNP: jax.Array, gate_BSNP: jax.Array) -> jax.Array:
        """Computes in float32, and returns the shape of `x_BSNP` in the dtype of the gate."""
        y, gate = x_BSNP.astype(jnp.float32), jax.nn.silu(gate_BSNP.astype(jnp.float32))
        y = y * gate if self.gate_first else y
        scale_W = read(self.scale, jnp.float32)
        grouped = y.reshape(*y.shape[:2], -1, scale_W.shape[0] // self.groups)
        grouped = grouped * jax.lax.rsqrt(jnp.mean(jnp.square(grouped), axis=-1, keepdims=True) + self.spec.eps)
        wide = grouped.reshape(*y.shape[:2], -1, scale_W.shape[0])
        y = (wide * with_rank_of(scale_W, wide)).reshape(y.shape)
        return (y if self.gate_first else y * gate).astype(gate_BSNP.dtype)
