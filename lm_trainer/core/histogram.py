"""Histograms whose counts never depend on the number of devices.

Minima, maxima and sums of integers are the same in any order, so XLA may reduce them over sharded arrays as it likes.

Shapes: G groups (layers), B bins.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lm_trainer.core.broadcast import with_rank_of

BINS = 64


def histogram(x: jax.Array, *, shared_edges: bool) -> tuple[jax.Array, jax.Array]:
    """Counts the finite values of an array [G, ...], each index of its first dimension apart.

    Args:
        x: the array; its other dimensions are the values of a group, at most 2^31 - 1.
        shared_edges: let all groups share their edges, those of all values together.

    Returns:
        counts_GB, int32, and edges_GE with E = B + 1, float32: bins of equal width between the least and the greatest
        value. A value on an edge belongs to the bin above it, the greatest to the last.
    """
    inside = tuple(range(1, x.ndim))
    x = x.astype(jnp.float32)
    finite = jnp.isfinite(x)
    over = None if shared_edges else inside
    low = jnp.min(x, axis=over, initial=jnp.inf, where=finite)
    high = jnp.max(x, axis=over, initial=-jnp.inf, where=finite)
    edges_GE = jnp.broadcast_to(_edges(low, high), (x.shape[0], BINS + 1))

    def count_below(edge_G: jax.Array) -> jax.Array:
        return jnp.sum((x < jnp.expand_dims(edge_G, inside)) & finite, axis=inside, dtype=jnp.int32)

    # One pass for each edge: comparing with all edges at once is six times slower on a CPU.
    below = jax.lax.map(count_below, edges_GE[:, 1:-1].T).T
    total = jnp.sum(finite, axis=inside, dtype=jnp.int32)[:, None]
    counts_GB = jnp.diff(jnp.concatenate([jnp.zeros_like(total), below, total], axis=1), axis=1)
    return counts_GB, edges_GE


def _edges(low: jax.Array, high: jax.Array) -> jax.Array:
    """[...] -> [..., B + 1]; around 0 if there is no value, and one wide if all values are equal."""
    # Without a finite value the least is inf and the greatest -inf.
    some = low <= high
    low, high = jnp.where(some, low, 0.0), jnp.where(some, high, 0.0)
    equal = low == high
    low, high = jnp.where(equal, low - 0.5, low), jnp.where(equal, high + 0.5, high)
    # A width of 17 bits makes its products with k / B exact, so that they are the same whether or not a compiler
    # contracts them and the addition to one instruction.
    width = jax.lax.reduce_precision(high - low, exponent_bits=8, mantissa_bits=16)
    fractions_B = jnp.arange(BINS, dtype=jnp.float32) / BINS
    inner = low[..., None] + width[..., None] * with_rank_of(fractions_B, width[..., None])
    return jnp.concatenate([inner, high[..., None]], axis=-1)
