"""Order of training: the row of a set that stands at each position of the run.

Shape letters: B rows of a batch, N positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.data.mixture import Mixture
from lm_trainer.data.rows.chunks import Chunks, read_mixed
from lm_trainer.data.shuffle import ShuffleConfig

_AHEAD = 1024
"""Positions among which the next row of every set is looked for."""


class Rows(Protocol):
    """Rows of one length, each of which can be read alone."""

    @property
    def seq_len(self) -> int: ...

    @property
    def num_rows(self) -> int: ...

    def read(self, rows_B: np.ndarray) -> Batch:
        """Reads some of the rows, each number in [0, num_rows)."""
        ...

    def spans(self, row: int) -> list[tuple[int, int]]:
        """Returns (start in the stream, number of inputs) of each run of tokens that a row holds."""
        ...

    def rows_with(self, start: int, stop: int) -> np.ndarray:
        """Returns the rows that hold any of the inputs [start, stop) of the stream: int64, rising."""
        ...


@dataclass(frozen=True)
class TrainSet:
    """One set to train on, and the order of its rows."""

    name: str
    rows: Rows
    num_rows: int
    """Rows in an epoch, from the start of `rows`."""
    shuffle: ShuffleConfig
    seed: int
    final: bool = True
    """False while the set grows: then these rows of the epoch are certain, and more may come."""
    augment: Callable[[Batch, np.ndarray], Batch] | None = None
    """Changes rows by their positions in the run; None: rows are as they were read."""

    def read(self, draws_N: np.ndarray, positions_N: np.ndarray) -> Batch:
        """Reads the rows of some draws, which stand at these positions of the run."""
        batch = self.rows.read(self.locate(draws_N))
        return batch if self.augment is None else self.augment(batch, positions_N)

    def locate(self, draws_N: np.ndarray) -> np.ndarray:
        """Returns the row of each draw: int64 [N]."""
        return self.shuffle.locate(draws_N, self.num_rows, self.seed)

    def draws(self, rows_N: np.ndarray, epoch: int) -> np.ndarray:
        """Returns the draw of each row in an epoch: int64 [N]."""
        return self.shuffle.draws(rows_N, epoch, self.num_rows, self.seed)


class RowOrigin(NamedTuple):
    """The place in its set of the row at one position."""

    set: TrainSet
    row: int
    """Number of the row within the set."""
    epoch: int
    """The epoch of the set, from 0."""


@dataclass(frozen=True)
class TrainOrder:
    """The rows of a run by their positions, on whatever host and device they land.

    Row r of the step that begins at position p is the row at position p + r.
    """

    sets: Sequence[TrainSet]
    mixture: Mixture
    length: int | None = None
    """Positions until the stop rule ends training; None = it never does."""

    def read(self, positions_B: np.ndarray) -> Batch:
        """Reads the rows at some positions."""
        parts = list(self._by_set(positions_B))
        if len(parts) == 1:
            return parts[0][1].read(parts[0][2], positions_B)
        # Chunks of several streams are read into one block, which saves a copy of every field.
        chunks = [
            (here, train.rows, train.locate(draws)) for here, train, draws in parts if isinstance(train.rows, Chunks)
        ]
        if len(chunks) == len(parts):
            return read_mixed(chunks)
        found = [(here, train.read(draws, positions_B[here])) for here, train, draws in parts]
        batch = jax.tree.map(lambda field: np.empty((len(positions_B), *field.shape[1:]), field.dtype), found[0][1])
        for here, part in found:
            for whole, field in zip(jax.tree.leaves(batch), jax.tree.leaves(part), strict=True):
                whole[here] = field
        return batch

    def first_uncertain(self, positions_N: np.ndarray, *, whole: bool = False) -> tuple[TrainSet, int | None] | None:
        """Finds a set that must grow before the rows at some positions are certain.

        Args:
            positions_N: int64 [N].
            whole: True if every set has to be complete.

        Returns:
            The set and the number of rows it must have (None = all); None if there is no such set.
        """
        growing = [train for train in self.sets if not train.final]
        if growing and whole:
            return growing[0], None
        for _, train, draws_N in self._by_set(positions_N) if growing else ():
            # Draws rise with positions and need no fewer rows, so the last draw speaks for all.
            rows = None if train.final else train.shuffle.rows_needed(int(draws_N.max()))
            if not train.final and (rows is None or rows > train.num_rows):
                return train, rows
        return None

    def next_rows(self, position: int) -> Iterator[tuple[str, Rows, int]]:
        """Yields (name, rows, the row that comes first at or after a position) for every set that soon has one."""
        for here, train, draws_N in self._by_set(position + np.arange(_AHEAD)):
            if len(here):
                yield train.name, train.rows, int(train.locate(draws_N[:1])[0])

    def origins(self, positions_N: np.ndarray) -> list[RowOrigin]:
        """Returns the origins of the rows at some positions, in their order."""
        found: dict[int, RowOrigin] = {}
        for here, train, draws in self._by_set(positions_N):
            epochs, rows = draws // train.num_rows, train.locate(draws)
            for place, row, epoch in zip(here.tolist(), rows.tolist(), epochs.tolist(), strict=True):
                found[place] = RowOrigin(train, row, epoch)
        return [found[place] for place in range(len(positions_N))]

    def positions(self, index: int, rows_N: np.ndarray, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yields (position, row, epoch) wherever rows of one set stand before a position, epoch by epoch.

        Args:
            index: of the set.
            rows_N: int64 [N] in [0, num_rows) of it.
            stop: the position; at most `length`.
        """
        train = self.sets[index]
        for epoch in itertools.count():
            begin = self._position(index, epoch * train.num_rows)
            if begin is None or begin >= stop:
                return
            for row, draw in zip(rows_N.tolist(), train.draws(rows_N, epoch).tolist(), strict=True):
                position = self._position(index, draw)
                if position is not None and position < stop:
                    yield position, row, epoch

    def _position(self, index: int, draw: int) -> int | None:
        return draw if len(self.sets) == 1 else self.mixture.position(index, draw)

    def _by_set(self, positions_N: np.ndarray) -> Iterator[tuple[np.ndarray, TrainSet, np.ndarray]]:
        """Yields (places in `positions_N`, set, draws of the set) for each set among the positions."""
        # A single set is drawn from at every position, so the draw is the position.
        if len(self.sets) == 1:
            yield np.arange(len(positions_N)), self.sets[0], positions_N
            return
        sets_N, draws_N = self.mixture.locate(positions_N)
        for index in np.unique(sets_N).tolist():
            here = np.flatnonzero(sets_N == index)
            yield here, self.sets[index], draws_N[here]
