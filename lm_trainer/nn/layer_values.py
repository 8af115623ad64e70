"""Values that layers pass on next to the residual stream.

Shape letters: B rows, S positions, D hidden dimension, P size of a layer's own embedding, K key and value heads, H head
size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lm_trainer.nn.spec import AttentionSpec, BlockSpec


class SharedKeys(NamedTuple):
    """Keys and values that several layers use, while all positions of a row are computed at once.

    Takes the place of a cache, which holds them when text is generated.
    """

    pairs: dict[int, tuple[jax.Array, jax.Array]]
    """Keys and values, [B, S, K, H] each, by the number of the layer that computes them."""

    @classmethod
    def empty(cls, blocks: Iterable[BlockSpec], x_BSD: jax.Array) -> SharedKeys | None:
        """Makes zeros for all keys and values that layers share, for the positions of a stream; None if they share
        none.
        """
        specs = {mixer.sharing.layer: mixer for mixer in shared_specs(blocks) if mixer.sharing is not None}
        pairs = {layer: _zeros(spec, x_BSD) for layer, spec in specs.items()}
        return cls(pairs) if pairs else None

    def read(self, layer: int, sizes: tuple[int, int, int]) -> tuple[jax.Array, jax.Array]:
        """Returns the keys and values of a layer; the same arguments as for `KvCache.read`."""
        del sizes
        return self.pairs[layer]

    def write(self, layer: int, k_BSKH: jax.Array, v_BSKH: jax.Array) -> SharedKeys:
        """Replaces the keys and values under the number of a layer."""
        return SharedKeys({**self.pairs, layer: (k_BSKH, v_BSKH)})


class FirstValues(NamedTuple):
    """Values that the embeddings of all layers read; see `LayerEmbeddingSpec`."""

    x_BSD: jax.Array
    """The stream before the first layer."""
    gain_BSP: jax.Array
    """float32; the gain of the norm that all layers share, repeated for each position, so that it is divided over
    devices as the stream is."""


def shared_specs(blocks: Iterable[BlockSpec]) -> list[AttentionSpec]:
    """Returns the attention of each layer that shares keys and values."""
    mixers = (block.mixer for block in blocks)
    return [mixer for mixer in mixers if isinstance(mixer, AttentionSpec) and mixer.sharing is not None]


def _zeros(spec: AttentionSpec, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
    k_BSKH = jnp.zeros((*x_BSD.shape[:2], spec.kv_heads, spec.head_dim), x_BSD.dtype)
    return k_BSKH, jnp.zeros((*k_BSKH.shape[:-1], spec.value_size), x_BSD.dtype)
