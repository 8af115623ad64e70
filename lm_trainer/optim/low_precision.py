"""Optimizer state in half the memory, and in a quarter of it."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lm_trainer.core.block_float import SIGNED, UNSIGNED, BlockFloats, Blocks, Format, decode, encode, shared_exponents
from lm_trainer.optim.params import Param, Params

_LEAST_SIZE = 4096
"""Numbers of a weight from which on its state is kept in 8 bits; it is the bound of bitsandbytes and torchao."""
_BLOCK = 32
"""Numbers in a block, as in MXFP8."""
_SHARDS = 8
"""Shards whose edges are edges of blocks wherever the length allows: the default of `trainer.elastic_shards`."""


class LowPrecisionState(NamedTuple):
    """State of a rule in less memory."""

    count: jax.Array
    """int32 [], updates so far."""
    inner: Any
    """The rule's own state, its arrays that are like parameters in bfloat16 or as `BlockFloats`."""


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
        key = _key(state.count)
        old, structure = jax.tree.flatten(state.inner)
        new = [
            round_by_chance(x, jax.random.fold_in(key, i)) if before.dtype == jnp.bfloat16 else x
            for i, (before, x) in enumerate(zip(old, structure.flatten_up_to(inner), strict=True))
        ]
        return updates, LowPrecisionState(state.count + 1, structure.unflatten(new))

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def keep_in_float8(
    rule: optax.GradientTransformationExtraArgs, params: Params, squares: Collection[str]
) -> optax.GradientTransformationExtraArgs:
    """Wraps a rule: it computes in float32, but its arrays in the shape of a large weight rest in 8 bits.

    They are rounded by chance, as in `keep_in_bfloat16`.

    Args:
        rule: keeps such arrays in dicts under the parameter's name, in a field of a named tuple.
        params: all that it updates.
        squares: names of the fields that hold averages of squares. They have no sign and need the exponents of a
            square, and those that are not 0 stay so, because an update is divided by their root.
    """
    blocks = {name: _blocks(param) for name, param in params.items()}

    def kept(path: tuple[Any, ...], x: jax.Array) -> tuple[Format, Blocks] | None:
        names = [part.key for part in path if isinstance(part, jax.tree_util.DictKey) and part.key in params]
        fields = [part.name for part in path if isinstance(part, jax.tree_util.GetAttrKey)]
        if not names or not fields or x.shape != params[names[-1]].shape:
            return None
        found = blocks[names[-1]]
        return None if found is None else (UNSIGNED if fields[-1] in squares else SIGNED, found)

    def init(weights: Any) -> LowPrecisionState:
        def stored(path: tuple[Any, ...], x: jax.Array) -> jax.Array | BlockFloats:
            how = kept(path, x)
            return x if how is None else encode(x, shared_exponents(x, *how), *how, jnp.zeros(x.shape, jnp.uint16))

        inner = rule.init(jax.tree.map(lambda p: p.astype(jnp.float32), weights))
        return LowPrecisionState(jnp.zeros((), jnp.int32), jax.tree_util.tree_map_with_path(stored, inner))

    def update(updates: Any, state: LowPrecisionState, weights: Any = None, /, **extra_args: Any) -> tuple[Any, Any]:
        old, structure = jax.tree_util.tree_flatten_with_path(state.inner, is_leaf=_is_coded)
        hows = [kept(path, x.codes) if _is_coded(x) else None for path, x in old]

        def computed(leaves: list[Any]) -> tuple[Any, list[Any]]:
            widened = [x if how is None else decode(x, *how) for x, how in zip(leaves, hows, strict=True)]
            done, inner = rule.update(updates, structure.unflatten(widened), weights, **extra_args)
            return done, structure.flatten_up_to(inner)

        # Computed twice: a number is rounded once the largest of its block is known, and kept until then all would be
        # in memory in float32 at once. The barrier keeps compilers from finding that both are the same.
        _, first = computed([x for _, x in old])
        shared = [None if how is None else shared_exponents(x, *how) for x, how in zip(first, hows, strict=True)]
        done, second = computed(jax.lax.optimization_barrier([x for _, x in old]))
        key = _key(state.count)

        def stored(i: int, x: jax.Array) -> jax.Array | BlockFloats:
            how, exponents = hows[i], shared[i]
            if how is None or exponents is None:
                return x
            return encode(x, exponents, *how, jax.random.bits(jax.random.fold_in(key, i), x.shape, jnp.uint16))

        new = [stored(i, x) for i, x in enumerate(second)]
        return done, LowPrecisionState(state.count + 1, structure.unflatten(new))

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _is_coded(x: Any) -> bool:
    return isinstance(x, BlockFloats)


def _blocks(param: Param) -> Blocks | None:
    """The blocks of the state of a parameter; None for one that is too small, and for vectors.

    They lie along the longest axis of a weight but the last, along which processors compute at once. An axis that can
    be cut in 8 is cut between blocks, so that no device needs numbers of another for the largest of a block.
    """
    lead, last = param.lead, len(param.shape) - 1
    if param.role == "vector" or math.prod(param.shape[lead:]) < _LEAST_SIZE:
        return None
    axis = max(range(lead, last), key=lambda i: param.shape[i])
    length = param.shape[axis]
    # `n & -n` is the largest power of two that divides n.
    even = (length & -length) // _SHARDS
    return Blocks(axis, even if _SHARDS <= even < _BLOCK else _BLOCK)


def _key(count: jax.Array) -> jax.Array:
    """The chance of an update: it follows from its number alone (and the place of the array, which is folded in), so
    that a resumed run, and one on another mesh, rounds as this one.
    """
    return jax.random.fold_in(jax.random.key(0), count)


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
