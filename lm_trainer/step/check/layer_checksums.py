"""Checksums of the gradients of every microbatch of a step, by parameter and layer.

Shape letters: S is the number of batch shards in one array, L the number of layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

import jax
import numpy as np

from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.step.check.digests import checksum
from lm_trainer.step.dispatch.microbatches import Microbatch
from lm_trainer.step.loss.gradient import Sums

MicrobatchChecksums = Mapping[str, list[int]]
"""Checksum of each array of the sums of a microbatch, by the name of the parameter or metric; one for each layer if the
parameter has layers."""


class LayerChecksums:
    """Receives the sums of microbatches while they are computed, and keeps checksums of all of them.

    Args:
        layered: names of the parameters whose first axis is over layers.
    """

    def __init__(self, layered: Collection[str]):
        self._layered = frozenset(layered)
        self._parts: list[tuple[jax.Array, dict[str, jax.Array]]] = []

    def __call__(self, group: int, microbatch: Microbatch, sums: Sums) -> None:
        """Receives the sums of one stage of a microbatch, which local group number `group` has computed."""
        del group
        # Enqueued before the sums are added up, which consumes them.
        self._parts.append((microbatch.index, wait_on_cpu(_checksums(self._layered, sums))))

    def read(self) -> list[MicrobatchChecksums]:
        """Waits for the checksums, and returns them by index of the microbatch in the global batch."""
        by_index: dict[int, dict[str, list[int]]] = {}
        first_arrays: dict[int, jax.Array] = {}
        for index, checksums in self._parts:
            for shard, number in enumerate(np.ravel(np.asarray(index)).tolist()):
                # A device with fewer microbatches than others may repeat one.
                if first_arrays.setdefault(number, index) is not index:
                    continue
                of_microbatch = by_index.setdefault(number, {})
                for name, values in checksums.items():
                    # If layers are computed one after the other, the last layer comes first.
                    of_microbatch[name] = np.ravel(np.asarray(values)[shard]).tolist() + of_microbatch.get(name, [])
        return [by_index[number] for number in sorted(by_index)]


@partial(jax.jit, static_argnums=0)
def _checksums(layered: frozenset[str], sums: Sums) -> dict[str, jax.Array]:
    """Returns checksums of each array, uint32 [S], or [S, L] for the arrays of all layers."""
    by_layer = jax.vmap(checksum, in_axes=1, out_axes=1)
    grads = {name: by_layer(x) if name in layered else checksum(x) for name, x in sums.tree.items()}
    return {**{name: checksum(x) for name, x in sums.scalars.items()}, **grads}
