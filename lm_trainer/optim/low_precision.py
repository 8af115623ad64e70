"""Optimizer state in half the memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class LowPrecisionState(NamedTuple):
    """The state of the rule, its arrays that are like parameters in bfloat16."""

    count: jax.Array
    """int32: updates so far."""
    inner: Any


def keep_in_bfloat16(rule: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """The same rule, which computes in float32 but keeps what is like its parameters in bfloat16.

    An average that moves by less than half of a bfloat16's last digit would stand still if it were rounded to the
    nearest; it is rounded up or down by chance, with the exact value as the mean (stochastic rounding; Gupta et al.
    2015, arXiv 1502.02551, section 3.1). The chance follows from the number of the update and the place of the array.
    """

    def init(params: Any) -> LowPrecisionState:
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16) if p.dtype == jnp.float32 else p, params)
        return LowPrecisionState(jnp.zeros((), jnp.int32), rule.init(low))

    def update(updates: Any, state: LowPrecisionState, params: Any = None, /, **extra_args: Any) -> tuple[Any, Any]:
        widened = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, state.inner)
        updates, inner = rule.update(updates, widened, params, **extra_args)
        key = jax.random.fold_in(jax.random.key(0), state.count)
        old, structure = jax.tree.flatten(state.inner)
        new = [
            round_by_chance(x, jax.random.fold_in(key, i)) if before.dtype == jnp.bfloat16 else x
            for i, (before, x) in enumerate(zip(old, structure.flatten_up_to(inner), strict=True))
        ]
        return updates, LowPrecisionState(state.count + 1, structure.unflatten(new))

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def round_by_chance(x: jax.Array, key: jax.Array) -> jax.Array:
    """float32 as bfloat16, of the two values around it the nearer one more often, so that the mean is exact.

    What is not finite stays as it is.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # A bfloat16 is the upper half of a float32: what is added carries into it as often as the lower half is large.
    dither = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    rounded = jax.lax.bitcast_convert_type(((bits + dither) >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
