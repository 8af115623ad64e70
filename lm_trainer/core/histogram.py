"""Histograms whose counts do not depend on the number of devices.

Minima, maxima and integer sums are the same in any order, so XLA may reduce them over sharded arrays in any way.

Shapes: G groups (layers), B bins.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lm_trainer.core.broadcast import with_rank_of

BINS = 64


def histogram(x: jax.Array, *, shared_edges: bool) -> tuple[jax.Array, jax.Array]:
    """Counts the finite values of an array [G, ...], separately for each group.

    Args:
        x: the array. Each group has at most 2^31 - 1 values.
        shared_edges: True to use the same edges for all groups, which span the values of all groups.

    Returns:
        counts_GB, int32, and edges_GE with E = B + 1, float32: bins of equal width between the minimum and the maximum.
        A value on an edge belongs to the bin above it, and the maximum belongs to the last bin.
    """
    inside = tuple(range(1, x.ndim))
    x = x.astype(jnp.float32)
    finite = jnp.isfinite(x)
    over = None if shared_edges else inside
    low = jnp.min(x, axis=over, initial=jnp.inf, where=finite)
    high = jnp.max(x, axis=over, initial=-jnp.inf, where=finite)
    edges_GE = jnp.broadcast_to(_bin_edges(low, high), (x.shape[0], BINS + 1))

    def count_below(edge_G: jax.Array) -> jax.Array:
        return jnp.sum((x < jnp.expand_dims(edge_G, inside)) & finite, axis=inside, dtype=jnp.int32)

    # One pass per edge, because comparing with all edges at once is six times slower on a CPU.
    below = jax.lax.map(count_below, edges_GE[:, 1:-1].T).T
    total = jnp.sum(finite, axis=inside, dtype=jnp.int32)[:, None]
    counts_GB = jnp.diff(jnp.concatenate([jnp.zeros_like(total), below, total], axis=1), axis=1)
    return counts_GB, edges_GE


def _bin_edges(low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns edges [..., B + 1]. They span 1 if all values are equal, and are centred on 0 without finite values."""
    # Without a finite value, the minimum is inf and the maximum -inf.
    some = low <= high
    low, high = jnp.where(some, low, 0.0), jnp.where(some, high, 0.0)
    equal = low == high
    low, high = jnp.where(equal, low - 0.5, low), jnp.where(equal, high + 0.5, high)
    # With a width of 17 bits, the products with k / B are exact, and therefore the same whether or not a compiler fuses
    # multiplication and addition into one instruction.
    width = jax.lax.reduce_precision(high - low, exponent_bits=8, mantissa_bits=16)
    fractions_B = jnp.arange(BINS, dtype=jnp.float32) / BINS
    inner = low[..., None] + width[..., None] * with_rank_of(fractions_B, width[..., None])
    return jnp.concatenate([inner, high[..., None]], axis=-1)
