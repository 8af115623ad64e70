"""Values logged inside the stages of a loss, passed along with the stream to the stage that computes the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lm_trainer.nn.log import Entry
from lm_trainer.step.loss.logged import LoggedValues, check_logged_names, logged_metrics

Logged = dict[str, jax.Array]
"""Values of each call of `log` before the last stage, float32 [number of executions], in order of execution."""

Shapes = Mapping[Entry, jax.ShapeDtypeStruct]


class LoggedStack(NamedTuple):
    """Shapes of the values that a stack of layers logs."""

    embed: Shapes
    """Values logged before the first layer."""
    layers: Sequence[Shapes]
    """Values logged by each layer."""


class _Starts(NamedTuple):
    """Index of the first value of each stage of a stack."""

    embed: Mapping[Entry, int]
    layers: Mapping[Entry, np.ndarray]
    """int32 [layers]."""


@dataclass(frozen=True)
class LoggedStages:
    """Calls of `log` before the last stage."""

    starts: Sequence[_Starts]
    """Indices of each stack."""
    counts: Mapping[Entry, int]
    """Total number of values."""

    @classmethod
    def from_shapes(cls, stacks: Sequence[LoggedStack]) -> LoggedStages:
        """Computes the index of each value, from the shapes of each stack in order of execution."""
        entries = dict.fromkeys(
            entry for stack in stacks for shapes in (stack.embed, *stack.layers) for entry in shapes
        )
        counts, starts = dict.fromkeys(entries, 0), []
        for embed, layers in stacks:
            embed_starts, layer_starts = dict[Entry, int](), dict[Entry, np.ndarray]()
            for entry in entries:
                times = [_num_values(shapes, entry) for shapes in layers]
                sizes = [counts[entry], _num_values(embed, entry), *times]
                first, *begins, counts[entry] = np.cumsum(sizes).tolist()
                embed_starts[entry], layer_starts[entry] = first, np.array(begins, np.int32)
            starts.append(_Starts(embed_starts, layer_starts))
        return cls(starts, counts)

    def start_arrays(self, values: LoggedValues) -> Logged:
        """Puts the values logged before the first layer into arrays that have room for the values of all stages."""
        rooms = {entry: jnp.zeros(count, jnp.float32) for entry, count in self.counts.items()}
        filled = {entry: rooms[entry].at[: len(x)].set(x) for entry, x in values.items()}
        return {_entry_name(entry): room for entry, room in {**rooms, **filled}.items()}

    def add_embed(self, logged: Logged, stack: int, values: LoggedValues) -> Logged:
        """Adds the values logged before the first layer of another stack to `logged`."""
        return _put(logged, values, self.starts[stack].embed)

    def add_layer(self, logged: Logged, stack: int, number: jax.Array, values: LoggedValues) -> Logged:
        """Adds the values of layer `number` of a stack to `logged`."""
        starts = self.starts[stack].layers
        return _put(logged, values, {entry: jnp.asarray(starts[entry])[number] for entry in values})

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


def _put(logged: Logged, values: LoggedValues, starts: Mapping[Entry, jax.Array | int]) -> Logged:
    put = {
        _entry_name(entry): jax.lax.dynamic_update_slice(logged[_entry_name(entry)], x, (starts[entry],))
        for entry, x in values.items()
    }
    return {**logged, **put}


def _num_values(shapes: Shapes, entry: Entry) -> int:
    return shapes[entry].shape[0] if entry in shapes else 0


def _entry_name(entry: Entry) -> str:
    return " ".join(map(str, entry))
