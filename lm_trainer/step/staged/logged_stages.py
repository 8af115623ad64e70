"""Values that are logged inside the stages of a loss: they go along with the stream to where the loss is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_trainer.nn.log import Entry
from lm_trainer.step.loss.logged import Found, check_logged_names, logged_metrics

Logged = dict[str, jax.Array]
"""The values of each call of `log` before the loss, float32 [times that it runs], in the order of execution."""

_Shapes = Mapping[Entry, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class LoggedStages:
    """The calls of `log` before the loss."""

    starts: Mapping[Entry, np.ndarray]
    """For each layer, the place of its first value; int32 [layers]."""
    counts: Mapping[Entry, int]
    """Values in all."""

    @classmethod
    def make(cls, enter: _Shapes, places: Sequence[_Shapes], num_layers: int) -> LoggedStages:
        """Finds the place of each value.

        Args:
            enter: shapes of what is logged before the first layer.
            places: those of a layer, at each place of the period.
            num_layers: number of layers.
        """
        entries = dict.fromkeys(entry for found in (enter, *places) for entry in found)
        starts, counts = {}, {}
        for entry in entries:
            times = [_times(places[layer % len(places)], entry) for layer in range(num_layers)]
            *begins, counts[entry] = np.cumsum([_times(enter, entry), *times]).tolist()
            starts[entry] = np.array(begins, np.int32)
        return cls(starts, counts)

    def start(self, found: Found) -> Logged:
        """The values of what comes before the layers, with room for theirs."""
        rooms = {entry: jnp.zeros(count, jnp.float32) for entry, count in self.counts.items()}
        filled = {entry: rooms[entry].at[: len(values)].set(values) for entry, values in found.items()}
        return {_key(entry): room for entry, room in {**rooms, **filled}.items()}

    def add(self, logged: Logged, number: jax.Array, found: Found) -> Logged:
        """`logged` with the values of a layer."""
        put = {
            _key(entry): jax.lax.dynamic_update_slice(
                logged[_key(entry)], values, (jnp.asarray(self.starts[entry])[number],)
            )
            for entry, values in found.items()
        }
        return {**logged, **put}

    def metrics(
        self, logged: Logged, found: Found, weight: jax.Array, metrics: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """The metrics of a loss, in which `found` is logged, with everything that is logged among them.

        Raises:
            UserError: for names that are not unique.
        """
        values: dict[Entry, list[Any]] = {entry: [logged[_key(entry)]] for entry in self.counts}
        for entry, more in found.items():
            values.setdefault(entry, []).append(more)
        joined = {entry: jnp.concatenate(each) for entry, each in values.items()}
        check_logged_names(joined, metrics)
        return {**metrics, **logged_metrics(joined, weight)}


def _times(found: _Shapes, entry: Entry) -> int:
    return found[entry].shape[0] if entry in found else 0


def _key(entry: Entry) -> str:
    return " ".join(map(str, entry))
