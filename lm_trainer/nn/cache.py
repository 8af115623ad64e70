"""Keys and values of past positions, cached during text generation.

Shape letters: L layers, B rows, T new tokens, C capacity in positions, K key heads, H head size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lm_trainer.nn.mixer_spec import cache_sizes, state_arrays
from lm_trainer.nn.spec import BlockSpec


class KvCache(NamedTuple):
    """Cache with one array for all layers: slot p of a row holds position p, so rows of different lengths need no left
    padding.

    The content of the slots after a row's newest position is undefined; they are written before a query can attend to
    them.
    """

    k: jax.Array
    """[L, B, C, K, H], for the layers that have keys of their own."""
    v: jax.Array
    """[L, B, C, K, H]; H may have another size."""

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int, int], dtype: DTypeLike, value_size: int) -> KvCache:
        """Makes a cache of shape [L, B, C, K, H], filled with zeros; `value_size` is the H of values."""
        return cls(jnp.zeros(shape, dtype), jnp.zeros((*shape[:-1], value_size), dtype))

    @property
    def capacity(self) -> int:
        """Maximum number of positions."""
        return self.k.shape[2]

    @property
    def dtype(self) -> DTypeLike:
        """Dtype of keys and values."""
        return self.k.dtype

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of heads of keys, and the sizes of a key and of a value."""
        return self.k.shape[3], self.k.shape[4], self.v.shape[4]

    def write(
        self, layer: jax.Array | int, positions_BT: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array
    ) -> tuple[KvCache, jax.Array, jax.Array]:
        """Stores the keys and values of one layer at their positions.

        Returns the cache, and all keys and values of the layer, [B, C, K, H]. Positions past the capacity are dropped.
        """
        # Indexes row and position together, because the rows of a batch can be at different positions.
        rows_B1 = jnp.arange(positions_BT.shape[0])[:, None]
        # Shorter rows are padded on the right, possibly past the capacity; the padding positions are never read.
        k = self.k.at[layer, rows_B1, positions_BT].set(k_BTKH.astype(self.k.dtype), mode="drop")
        v = self.v.at[layer, rows_B1, positions_BT].set(v_BTKH.astype(self.v.dtype), mode="drop")
        return KvCache(k, v), k[layer], v[layer]

    def read(self, layer: jax.Array | int, sizes: tuple[int, int, int]) -> tuple[jax.Array, jax.Array]:
        """Returns all keys and values of a layer whose heads have these `sizes`, [B, C, K, H]."""
        del sizes
        return self.k[layer], self.v[layer]


class SplitKvCache(NamedTuple):
    """Like `KvCache`, but with separate arrays for each layer, in the dimension order in which attention multiplies
    them, which avoids copies.

    Only for unrolled layers: each layer takes the first pair of arrays and appends the updated pair at the end.
    """

    layers: tuple[tuple[jax.Array, jax.Array], ...]
    """Keys and values of each layer, [B, K, C, H]."""

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int, int], dtype: DTypeLike, value_size: int) -> SplitKvCache:
        """Makes a cache from the shape [L, B, C, K, H], filled with zeros; `value_size` is the H of values."""
        count, rows, capacity, heads, size = shape
        zeros = lambda size: jnp.zeros((rows, heads, capacity, size), dtype)  # noqa: E731
        return cls(tuple((zeros(size), zeros(value_size)) for _ in range(count)))

    @property
    def capacity(self) -> int:
        """Maximum number of positions."""
        return self.layers[0][0].shape[2]

    @property
    def dtype(self) -> DTypeLike:
        """Dtype of keys and values."""
        return self.layers[0][0].dtype

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Same as `KvCache.sizes`."""
        k, v = self.layers[0]
        return k.shape[1], k.shape[3], v.shape[3]

    def write(
        self, layer: jax.Array | int, positions_BT: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array
    ) -> tuple[SplitKvCache, jax.Array, jax.Array]:
        """Same as `KvCache.write`; must be called for the layers in order."""
        del layer
        rows_B1 = jnp.arange(positions_BT.shape[0])[:, None]
        first, *other_layers = self.layers
        # The head index is between the row and position indices, so the indexed dimensions come first in the update.
        k, v = (
            old.at[rows_B1, :, positions_BT].set(new.astype(old.dtype), mode="drop")
            for old, new in zip(first, (k_BTKH, v_BTKH), strict=True)
        )
        return SplitKvCache((*other_layers, (k, v))), jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)


class SizedKvCache(NamedTuple):
    """Keys and values of layers whose heads differ in number or size: one cache for the layers of each kind."""

    caches: tuple[KvCache | SplitKvCache, ...]
    rows_L: jax.Array
    """int32; index of each layer among the layers of its kind."""

    @property
    def capacity(self) -> int:
        """Maximum number of positions."""
        return self.caches[0].capacity

    @property
    def dtype(self) -> DTypeLike:
        """Dtype of keys and values."""
        return self.caches[0].dtype

    def write(
        self, layer: jax.Array | int, positions_BT: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array
    ) -> tuple[SizedKvCache, jax.Array, jax.Array]:
        """Same as `KvCache.write`."""
        kind = self._kind((k_BTKH.shape[2], k_BTKH.shape[3], v_BTKH.shape[3]))
        cache, k_BCKH, v_BCKH = self.caches[kind].write(self.rows_L[layer], positions_BT, k_BTKH, v_BTKH)
        return self._replace(caches=(*self.caches[:kind], cache, *self.caches[kind + 1 :])), k_BCKH, v_BCKH

    def read(self, layer: jax.Array | int, sizes: tuple[int, int, int]) -> tuple[jax.Array, jax.Array]:
        """Same as `KvCache.read`."""
        cache = self.caches[self._kind(sizes)]
        assert isinstance(cache, KvCache)
        return cache.read(self.rows_L[layer], sizes)

    def _kind(self, sizes: tuple[int, int, int]) -> int:
        return next(kind for kind, cache in enumerate(self.caches) if cache.sizes == sizes)


class StateCache(NamedTuple):
    """Cache of a model in which some or all layers keep states of a fixed size instead of keys and values."""

    keys: KvCache | SizedKvCache | None
    """Keys and values of the layers that keep them; None without such layers."""
    states: tuple[jax.Array, ...]
    """Arrays of the other layers, [L, B, ...] each."""
    rows_L: jax.Array
    """int32; index of each layer of the model among the layers of its kind."""

    @property
    def capacity(self) -> int:
        """Maximum number of positions with keys; 0 without keys, for any number of positions."""
        return 0 if self.keys is None else self.keys.capacity

    @property
    def dtype(self) -> DTypeLike:
        """Dtype of keys and values, and of the inputs of convolutions."""
        return self.states[0].dtype

    def write(
        self, layer: jax.Array | int, positions_BT: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array
    ) -> tuple[StateCache, jax.Array, jax.Array]:
        """Same as `KvCache.write`."""
        assert self.keys is not None
        keys, k_BCKH, v_BCKH = self.keys.write(self.rows_L[layer], positions_BT, k_BTKH, v_BTKH)
        return self._replace(keys=keys), k_BCKH, v_BCKH

    def read(self, layer: jax.Array | int, sizes: tuple[int, int, int]) -> tuple[jax.Array, jax.Array]:
        """Same as `KvCache.read`."""
        assert self.keys is not None
        return self.keys.read(self.rows_L[layer], sizes)

    def read_states(self, layer: jax.Array | int) -> tuple[jax.Array, ...]:
        """Returns the arrays of one layer."""
        return tuple(x[self.rows_L[layer]] for x in self.states)

    def write_states(self, layer: jax.Array | int, states: tuple[jax.Array, ...]) -> StateCache:
        """Stores the arrays of one layer."""
        row = self.rows_L[layer]
        pairs = zip(self.states, states, strict=True)
        return self._replace(states=tuple(old.at[row].set(new.astype(old.dtype)) for old, new in pairs))


LayerCache = KvCache | SplitKvCache | SizedKvCache | StateCache
"""Values that the layers of a model keep of earlier positions."""


NewCache = Callable[[tuple[int, int, int, int, int], DTypeLike, int], Any]
"""`KvCache.empty` or `SplitKvCache.empty`."""


def init_cache(
    blocks: Sequence[BlockSpec], new_cache: NewCache, rows: int, capacity: int, dtype: DTypeLike
) -> LayerCache:
    """Makes an empty cache of a model for `rows` rows of `capacity` positions.

    Layers with states share their arrays, and layers whose heads agree in number and size share one array.

    Args:
        blocks: the layers.
        new_cache: makes the cache of keys and values.
        rows: number of rows.
        capacity: number of positions.
        dtype: dtype of keys, values and inputs of convolutions.
    """
    sizes = [cache_sizes(block.mixer) for block in blocks]
    keys = _init_keys([size for size in sizes if size is not None], new_cache, rows, capacity, dtype)
    states = {state_arrays(block.mixer) for block in blocks} - {()}
    if keys is not None and not states:
        return keys
    (arrays,) = states
    count = sum(size is None for size in sizes)
    rows_L = [sum((other is None) == (size is None) for other in sizes[:layer]) for layer, size in enumerate(sizes)]
    zeros = (jnp.zeros((count, rows, *x.shape), jnp.float32 if x.float32 else dtype) for x in arrays)
    return StateCache(keys, tuple(zeros), jnp.asarray(rows_L, jnp.int32))


def _init_keys(
    sizes: Sequence[tuple[int, int, int]], new_cache: NewCache, rows: int, capacity: int, dtype: DTypeLike
) -> Any:
    """Makes the cache of the layers with keys, given their `cache_sizes`; None without such layers."""
    counts = Counter(sizes)
    caches = tuple(
        new_cache((count, rows, capacity, heads, key_size), dtype, value_size)
        for (heads, key_size, value_size), count in counts.items()
    )
    if len(caches) < 2:
        return caches[0] if caches else None
    rows_L = [sizes[:layer].count(size) for layer, size in enumerate(sizes)]
    return SizedKvCache(caches, jnp.asarray(rows_L, jnp.int32))
