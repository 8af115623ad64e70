"""Normalization.

Shape letters: `...` any leading dimensions, D the last dimension, which is normalized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from lm_trainer.core.broadcast import with_rank_of
from lm_trainer.nn.init import Initializer
from lm_trainer.nn.read import read
from lm_trainer.nn.spec import NormSpec

_KINDS = {"layer": "LayerNorm", "rms": "RMSNorm"}


class Norm(nnx.Module):
    """Layer (Ba et al. 2016) or RMS normalization, computed in float32 and returned in the dtype of its input.

    `axis` gives the name and size of the normalized dimension.
    """

    def __init__(self, spec: NormSpec, axis: Mapping[str, int], *, init: Initializer):
        self.spec = spec
        self.scale = init.constant(axis, 0.0 if spec.unit_offset else 1.0) if spec.scale else None
        self.bias = init.constant(axis, 0.0) if spec.bias else None

    def gain(self, x: jax.Array) -> jax.Array:
        """Returns the learned factor of each dimension, float32 in the rank of `x`, [..., D]; only with `scale`."""
        assert self.scale is not None
        scale = with_rank_of(read(self.scale, jnp.float32), x)
        # Added in float32: just above 1, bfloat16 has steps of 1/128.
        return 1.0 + scale if self.spec.unit_offset else scale

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes the last dimension of [..., D]."""
        # bfloat16 has 8 bits of precision, which is too few for sums over the dimension and for differences from the
        # mean.
        y = x.astype(jnp.float32)
        if self.spec.kind == "layer":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        # Epsilon is inside the root, as in the published models. For centered values the mean square is the variance,
        # so both kinds of norm share this line.
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.spec.eps)
        if self.scale is not None:
            y = y * self.gain(y)
        if self.bias is not None:
            y = y + with_rank_of(read(self.bias, jnp.float32), y)
        if self.spec.factor is not None:
            # In float32, so that a factor that is not a power of 2 adds no rounding.
            y = y * self.spec.factor
        return y.astype(x.dtype)


def identity(x: jax.Array) -> jax.Array:
    """Returns its argument unchanged. Used if there is no norm."""
    return x


def make_norm(spec: NormSpec | None, axis: Mapping[str, int], *, init: Initializer) -> Callable[[jax.Array], jax.Array]:
    """Builds the norm described by `spec`; returns the identity if `spec` is None."""
    return identity if spec is None else Norm(spec, axis, init=init)


def norm_kinds(module: nnx.Module) -> dict[str, str]:
    """Maps the dotted name of each norm parameter of a module to `LayerNorm` or `RMSNorm`."""
    classes = {
        path: _KINDS[node.spec.kind] if isinstance(node, Norm) else type(node).__name__
        for path, node in nnx.iter_graph(module)
        if isinstance(node, Norm | nnx.LayerNorm | nnx.RMSNorm)
    }
    params = [path for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))]
    return {".".join(map(str, path)): classes[path[:-1]] for path in params if path[:-1] in classes}
