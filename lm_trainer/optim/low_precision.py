"""Optimizer state in half the memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class LowPrecisionState(NamedTuple):
    """State of a rule in half the memory."""

    count: jax.Array
    """int32 [], updates so far."""
    inner: Any
    """The rule's own state, its arrays that are like parameters in bfloat16."""


def keep_in_bfloat16(rule: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Wraps a rule: it computes in float32, but its arrays that are like parameters rest in bfloat16.

    They are rounded up or down by chance, with the exact value as the mean (stochastic rounding; Gupta et al. 2015,
    arXiv 1502.02551, section 3.1). Rounded to the nearest, an average that changes by less than half of a bfloat16's
    last digit at each step would never change.
    """

    def init(params: Any) -> LowPrecisionState:
        # The rule makes its state like the parameters it is shown: shown bfloat16, it makes bfloat16. Scalars and small
        # arrays, which it makes in float32 or integers, stay.
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16) if p.dtype == jnp.float32 else p, params)
        return LowPrecisionState(jnp.zeros((), jnp.int32), rule.init(low))

    def update(updates: Any, state: LowPrecisionState, params: Any = None, /, **extra_args: Any) -> tuple[Any, Any]:
        widened = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, state.inner)
        updates, inner = rule.update(updates, widened, params, **extra_args)
        # The chance follows from the number of the update and the place of the array alone, so that a resumed run, and
        # one on another mesh, rounds as this one.
        key = jax.random.fold_in(jax.random.key(0), state.count)
        old, structure = jax.tree.flatten(state.inner)
        new = [
            round_by_chance(x, jax.random.fold_in(key, i)) if before.dtype == jnp.bfloat16 else x
            for i, (before, x) in enumerate(zip(old, structure.flatten_up_to(inner), strict=True))
        ]
        return updates, LowPrecisionState(state.count + 1, structure.unflatten(new))

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def round_by_chance(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds float32 to one of the two bfloat16 around it, the nearer one more often, so that the mean is exact.

    Shape stays; a number that is not finite stays as it is.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # A bfloat16 is the upper half of a float32. Of 16 random bits that are added to the lower half, a carry reaches the
    # upper one with a probability of the lower half over 2^16.
    dither = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    rounded = jax.lax.bitcast_convert_type(((bits + dither) >> 16).astype(jnp.uint16), jnp.bfloat16)
    # The carry could turn a NaN or an infinity into something else.
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
