"""Optimizer state in a half or a quarter of the memory."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lm_trainer.core.block_float import SIGNED, UNSIGNED, BlockFloats, Blocks, Format, block_exponents, decode, encode
from lm_trainer.core.jax_types import PyTree
from lm_trainer.optim.params import Arrays, Param, Params

_LEAST_SIZE = 4096
"""Minimum number of elements of a weight whose state is stored in 8 bits; same as in bitsandbytes and torchao."""
_BLOCK = 32
"""Number of elements per block, as in MXFP8."""
_SHARDS = 8
"""Number of shards whose boundaries coincide with block boundaries if the length allows it: the default of
`trainer.elastic_shards`."""


class LowPrecisionState(NamedTuple):
    """State of a rule that is stored in less memory."""

    count: jax.Array
    """int32 []; number of updates so far."""
    inner: PyTree
    """State of the wrapped rule; arrays in the shape of parameters are stored as bfloat16 or `BlockFloats`."""


def keep_in_bfloat16(rule: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Wraps a rule so that it computes in float32 but stores its arrays in the shape of parameters in bfloat16.

    The mean of stochastic rounding is the exact value (Gupta et al. 2015, arXiv 1502.02551, section 3.1). With rounding
    to nearest, an average would never change if its changes were below half of the last digit of bfloat16.
    """

    def init(params: Arrays) -> LowPrecisionState:
        # The rule creates its state in the dtype of the parameters it gets, so bfloat16 parameters lead to a bfloat16
        # state. Scalars and small arrays are not affected, because the rule creates them as float32 or integers.
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16) if p.dtype == jnp.float32 else p, params)
        return LowPrecisionState(jnp.zeros((), jnp.int32), rule.init(low))

    def update(
        updates: Arrays, state: LowPrecisionState, params: Arrays | None = None, /, **extra_args: PyTree
    ) -> tuple[PyTree, LowPrecisionState]:
        widened = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, state.inner)
        new_updates, inner = rule.update(updates, widened, params, **extra_args)
        key = _rounding_key(state.count)
        old, structure = jax.tree.flatten(state.inner)
        new = [
            round_stochastically(x, jax.random.fold_in(key, i)) if previous.dtype == jnp.bfloat16 else x
            for i, (previous, x) in enumerate(zip(old, structure.flatten_up_to(inner), strict=True))
        ]
        return new_updates, LowPrecisionState(state.count + 1, structure.unflatten(new))

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def keep_in_float8(
    rule: optax.GradientTransformationExtraArgs, params: Params, squares: Collection[str]
) -> optax.GradientTransformationExtraArgs:
    """Wraps a rule so that it computes in float32 but stores its arrays in the shape of a large weight in 8 bits.

    Rounding is stochastic, as in `keep_in_bfloat16`.

    Args:
        rule: a rule that stores such arrays in dicts by parameter name, in fields of a named tuple.
        params: all parameters that the rule updates.
        squares: names of the fields that contain averages of squares. They have no sign and need the exponents of a
            square. Nonzero values stay nonzero, because the update is divided by their root.
    """
    blocks = {name: _state_blocks(param) for name, param in params.items()}

    def find_coding(path: jax.tree_util.KeyPath, x: jax.Array) -> tuple[Format, Blocks] | None:
        names = [part.key for part in path if isinstance(part, jax.tree_util.DictKey) and part.key in params]
        fields = [part.name for part in path if isinstance(part, jax.tree_util.GetAttrKey)]
        if not names or not fields or x.shape != params[names[-1]].shape:
            return None
        layout = blocks[names[-1]]
        return None if layout is None else (UNSIGNED if fields[-1] in squares else SIGNED, layout)

    def init(weights: Arrays) -> LowPrecisionState:
        def encode_leaf(path: jax.tree_util.KeyPath, x: jax.Array) -> jax.Array | BlockFloats:
            coding = find_coding(path, x)
            if coding is None:
                return x
            return encode(x, block_exponents(x, *coding), *coding, jnp.zeros(x.shape, jnp.uint16))

        inner = rule.init(jax.tree.map(lambda p: p.astype(jnp.float32), weights))
        # Most rules begin with zeros. XLA would encode them while it compiles, at ten million elements a minute.
        inner = jax.lax.optimization_barrier(inner)
        return LowPrecisionState(jnp.zeros((), jnp.int32), jax.tree_util.tree_map_with_path(encode_leaf, inner))

    def update(
        updates: Arrays, state: LowPrecisionState, weights: Arrays | None = None, /, **extra_args: PyTree
    ) -> tuple[PyTree, LowPrecisionState]:
        old, structure = jax.tree_util.tree_flatten_with_path(state.inner, is_leaf=_is_coded)
        codings = [find_coding(path, x.codes) if _is_coded(x) else None for path, x in old]

        def run_rule(leaves: list[PyTree]) -> tuple[PyTree, list[jax.Array]]:
            widened = [x if coding is None else decode(x, *coding) for x, coding in zip(leaves, codings, strict=True)]
            done, inner = rule.update(updates, structure.unflatten(widened), weights, **extra_args)
            return done, structure.flatten_up_to(inner)

        # Computed twice: rounding needs the largest value of each block, and keeping all results until it is known
        # would hold all of them in float32 at once. The barrier prevents the compiler from merging the two
        # computations.
        _, first = run_rule([x for _, x in old])
        shared = [
            None if coding is None else block_exponents(x, *coding) for x, coding in zip(first, codings, strict=True)
        ]
        done, second = run_rule(jax.lax.optimization_barrier([x for _, x in old]))
        key = _rounding_key(state.count)

        def encode_leaf(i: int, x: jax.Array) -> jax.Array | BlockFloats:
            coding, exponents = codings[i], shared[i]
            if coding is None or exponents is None:
                return x
            return encode(x, exponents, *coding, jax.random.bits(jax.random.fold_in(key, i), x.shape, jnp.uint16))

        new = [encode_leaf(i, x) for i, x in enumerate(second)]
        return done, LowPrecisionState(state.count + 1, structure.unflatten(new))

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _is_coded(x: object) -> bool:
    return isinstance(x, BlockFloats)


def _state_blocks(param: Param) -> Blocks | None:
    """Returns the blocks of the state of a parameter; None for small parameters and vectors.

    Blocks are along the longest axis of a weight except the last axis, along which processors compute in parallel. An
    axis divisible by 8 is sharded between blocks, so no device needs values from another device to find the largest
    value of a block.
    """
    lead, last = param.lead, len(param.shape) - 1
    if param.role == "vector" or math.prod(param.shape[lead:]) < _LEAST_SIZE:
        return None
    axis = max(range(lead, last), key=lambda i: param.shape[i])
    length = param.shape[axis]
    # `n & -n` is the largest power of two that divides n.
    even = (length & -length) // _SHARDS
    return Blocks(axis, even if _SHARDS <= even < _BLOCK else _BLOCK)


def _rounding_key(count: jax.Array) -> jax.Array:
    """Returns the random key of an update, which depends only on its number; the index of an array is folded in later.

    A resumed run, or a run on another mesh, therefore rounds in the same way.
    """
    return jax.random.fold_in(jax.random.key(0), count)


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds float32 to one of the two adjacent bfloat16 values, the nearer one with higher probability, so that the
    mean is exact.

    Non-finite numbers are not changed.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # A bfloat16 number is the upper half of a float32 number. When 16 random bits are added to the lower half, the
    # probability of a carry into the upper half is the lower half over 2^16.
    dither = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    rounded = jax.lax.bitcast_convert_type(((bits + dither) >> 16).astype(jnp.uint16), jnp.bfloat16)
    # A carry could turn a NaN or an infinity into another value.
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
