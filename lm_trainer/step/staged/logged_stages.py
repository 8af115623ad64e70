"""Values logged inside the stages of a loss, passed along with the stream to the stage that computes the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from lm_trainer.nn.log import Entry
from lm_trainer.step.loss.logged import LoggedValues, check_logged_names, logged_metrics

Logged = dict[str, jax.Array]
"""Values of each call of `log` before the last stage, float32 [number of executions], in order of execution."""

_Shapes = Mapping[Entry, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class LoggedStages:
    """Calls of `log` before the last stage."""

    starts: Mapping[Entry, np.ndarray]
    """Index of the first value of each layer, int32 [layers]."""
    counts: Mapping[Entry, int]
    """Total number of values."""

    @classmethod
    def from_shapes(cls, embed: _Shapes, layers: Sequence[_Shapes]) -> LoggedStages:
        """Computes the index of each value.

        Args:
            embed: shapes of the values logged before the first layer.
            layers: shapes of the values logged by each layer.
        """
        entries = dict.fromkeys(entry for shapes in (embed, *layers) for entry in shapes)
        starts, counts = {}, {}
        for entry in entries:
            times = [_num_values(shapes, entry) for shapes in layers]
            *begins, counts[entry] = np.cumsum([_num_values(embed, entry), *times]).tolist()
            starts[entry] = np.array(begins, np.int32)
        return cls(starts, counts)

    def start_arrays(self, values: LoggedValues) -> Logged:
        """Puts the values logged before the layers into arrays that have room for the values of the layers."""
        rooms = {entry: jnp.zeros(count, jnp.float32) for entry, count in self.counts.items()}
        filled = {entry: rooms[entry].at[: len(x)].set(x) for entry, x in values.items()}
        return {_entry_name(entry): room for entry, room in {**rooms, **filled}.items()}

    def add_layer(self, logged: Logged, number: jax.Array, values: LoggedValues) -> Logged:
        """Adds the values of layer `number` to `logged`."""
        put = {
            _entry_name(entry): jax.lax.dynamic_update_slice(
                logged[_entry_name(entry)], x, (jnp.asarray(self.starts[entry])[number],)
            )
            for entry, x in values.items()
        }
        return {**logged, **put}

    def add_to_metrics(
        self, logged: Logged, head: LoggedValues, weight: jax.Array, metrics: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Adds all logged values to the metrics of a loss.

        Args:
            logged: values logged before the last stage.
            head: values logged in the last stage.
            weight: sum of the weights of the microbatch.
            metrics: metrics that the loss returns.

        Raises:
            UserError: if names are not unique.
        """
        values: dict[Entry, list[jax.Array]] = {entry: [logged[_entry_name(entry)]] for entry in self.counts}
        for entry, more in head.items():
            values.setdefault(entry, []).append(more)
        joined = {entry: jnp.concatenate(parts) for entry, parts in values.items()}
        check_logged_names(joined, metrics)
        return {**metrics, **logged_metrics(joined, weight)}


def _num_values(shapes: _Shapes, entry: Entry) -> int:
    return shapes[entry].shape[0] if entry in shapes else 0


def _entry_name(entry: Entry) -> str:
    return " ".join(map(str, entry))
