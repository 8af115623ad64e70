"""Keys and values of past positions, kept while text is generated.

Shape letters: L layers, B rows, T new tokens, C capacity in positions, K key heads, H head size.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class KvCache(NamedTuple):
    """Slot p of a row holds position p of that row, so rows of different lengths need no padding on the left.

    A slot past a row's newest position may hold anything: it is written before a query can see it.
    """

    k: jax.Array
    """[L, B, C, K, H]."""
    v: jax.Array
    """[L, B, C, K, H]."""

    def write(
        self, layer: jax.Array | int, positions_BT: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array
    ) -> tuple[KvCache, jax.Array, jax.Array]:
        """Stores keys and values of one layer at their positions.

        Returns the cache, and all keys and values of that layer, [B, C, K, H]. Positions past its capacity
        are dropped.
        """
        # Indexed by row and position together: the rows of a batch are at different positions.
        rows_B1 = jnp.arange(positions_BT.shape[0])[:, None]
        # Shorter rows are filled up on the right, maybe past the capacity: nothing reads those positions.
        k = self.k.at[layer, rows_B1, positions_BT].set(k_BTKH.astype(self.k.dtype), mode="drop")
        v = self.v.at[layer, rows_B1, positions_BT].set(v_BTKH.astype(self.v.dtype), mode="drop")
        return KvCache(k, v), k[layer], v[layer]
