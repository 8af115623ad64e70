"""The order of training: maps each position of the run to a row of a set.

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
from lm_trainer.data.cache.row_values import RowValues
from lm_trainer.data.mixture import Mixture
from lm_trainer.data.rows.chunks import Chunks, read_mixed
from lm_trainer.data.rows.uncounted import TokenMask
from lm_trainer.data.shuffle import ShuffleConfig

_LOOKAHEAD = 1024
"""Number of positions to search for the next row of every set."""


class Rows(Protocol):
    """Rows of equal length with random access."""

    @property
    def seq_len(self) -> int: ...

    @property
    def num_rows(self) -> int: ...

    def read(self, rows_B: np.ndarray) -> Batch:
        """Reads rows by their numbers, which are in [0, num_rows)."""
        ...

    def token_runs(self, row: int) -> list[tuple[int, int]]:
        """Returns the start in the stream and the number of inputs of each run of tokens in a row."""
        ...

    def rows_containing(self, start: int, stop: int) -> np.ndarray:
        """Returns the rows that have any of the stream's tokens [start, stop) as inputs: int64, increasing."""
        ...


@dataclass(frozen=True)
class TrainSet:
    """A set to train on, and the order of its rows."""

    name: str
    rows: Rows
    num_rows: int
    """Number of rows in an epoch. These are the first ones of `rows`."""
    shuffle: ShuffleConfig
    seed: int
    final: bool = True
    """False while the set grows. The rows so far are final even then, but more may follow."""
    augment: Callable[[Batch, np.ndarray], Batch] | None = None
    """Changes a batch, given the positions of its rows in the run; None means no change."""

    mask: TokenMask | None = None
    """Makes padding of documents that do not count; None if all of them count."""

    def read(self, draws_N: np.ndarray, positions_N: np.ndarray) -> Batch:
        """Reads the rows of the given draws, whose positions in the run are `positions_N`."""
        rows_N = self.rows_of_draws(draws_N)
        batch = self.rows.read(rows_N)
        batch = batch if self.mask is None else self.mask.apply(batch, rows_N)
        return batch if self.augment is None else self.augment(batch, positions_N)

    def rows_of_draws(self, draws_N: np.ndarray) -> np.ndarray:
        """Returns the row of each draw: int64 [N]."""
        return self.shuffle.rows_of_draws(draws_N, self.num_rows, self.seed)

    def draws_of_rows(self, rows_N: np.ndarray, epoch: int) -> np.ndarray:
        """Returns the draw that yields each row in the given epoch: int64 [N]."""
        return self.shuffle.draws_of_rows(rows_N, epoch, self.num_rows, self.seed)


class RowOrigin(NamedTuple):
    """The origin of the row at one position."""

    set: TrainSet
    row: int
    """Number of the row within the set."""
    epoch: int
    """Epoch of the set, counted from 0."""


@dataclass(frozen=True)
class TrainOrder:
    """The rows of a run by position, which do not depend on the hosts and devices.

    Row r of the step that begins at position p is the row at position p + r.
    """

    sets: Sequence[TrainSet]
    mixture: Mixture
    length: int | None = None
    """Number of positions until the stop rule ends training; None if it never does."""
    frozen: RowValues | None = None
    """Values of a frozen model for the row at each position; see `Batch.frozen`."""

    def read(self, positions_B: np.ndarray) -> Batch:
        """Reads the rows at the given positions."""
        batch = self._read_rows(positions_B)
        return batch if self.frozen is None else batch._replace(frozen=self.frozen.read(positions_B))

    def _read_rows(self, positions_B: np.ndarray) -> Batch:
        parts = list(self._group_by_set(positions_B))
        if len(parts) == 1:
            return parts[0][1].read(parts[0][2], positions_B)
        # Chunks of several streams are read into a single block, which saves a copy of every field.
        chunks = [
            (indices, train.rows, train.rows_of_draws(draws))
            for indices, train, draws in parts
            if isinstance(train.rows, Chunks) and train.mask is None
        ]
        if len(chunks) == len(parts):
            return read_mixed(chunks)
        batches = [(indices, train.read(draws, positions_B[indices])) for indices, train, draws in parts]
        batch = jax.tree.map(lambda field: np.empty((len(positions_B), *field.shape[1:]), field.dtype), batches[0][1])
        for indices, part in batches:
            for merged, field in zip(jax.tree.leaves(batch), jax.tree.leaves(part), strict=True):
                merged[indices] = field
        return batch

    def blocking_set(self, positions_N: np.ndarray, *, need_all: bool = False) -> tuple[TrainSet, int | None] | None:
        """Finds a set that must grow before the rows at the given positions are final.

        Args:
            positions_N: int64 [N].
            need_all: True if every set must be complete.

        Returns:
            A pair of the set and the number of rows that it must have, where None means all rows; None if no set has to
            grow.
        """
        growing = [train for train in self.sets if not train.final]
        if growing and need_all:
            return growing[0], None
        for _, train, draws_N in self._group_by_set(positions_N) if growing else ():
            # Later draws need at least as many rows as earlier ones, so the last draw decides.
            rows = None if train.final else train.shuffle.num_rows_needed(int(draws_N.max()))
            if not train.final and (rows is None or rows > train.num_rows):
                return train, rows
        return None

    def upcoming_rows(self, position: int) -> Iterator[tuple[str, Rows, int]]:
        """Yields (name, rows, number of the next row) for every set with a row at or soon after a position."""
        for indices, train, draws_N in self._group_by_set(position + np.arange(_LOOKAHEAD)):
            if len(indices):
                yield train.name, train.rows, int(train.rows_of_draws(draws_N[:1])[0])

    def row_origins(self, positions_N: np.ndarray) -> list[RowOrigin]:
        """Returns the origins of the rows at the given positions, in the order of the positions."""
        origins: dict[int, RowOrigin] = {}
        for indices, train, draws in self._group_by_set(positions_N):
            epochs, rows = draws // train.num_rows, train.rows_of_draws(draws)
            for index, row, epoch in zip(indices.tolist(), rows.tolist(), epochs.tolist(), strict=True):
                origins[index] = RowOrigin(train, row, epoch)
        return [origins[index] for index in range(len(positions_N))]

    def find_positions(self, index: int, rows_N: np.ndarray, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yields (position, row, epoch) for every occurrence of one set's rows before `stop`, epoch by epoch.

        Args:
            index: index of the set.
            rows_N: int64 [N], numbers of rows in [0, num_rows) of the set.
            stop: exclusive end of the positions; at most `length`.
        """
        train = self.sets[index]
        for epoch in itertools.count():
            begin = self._position_of_draw(index, epoch * train.num_rows)
            if begin is None or begin >= stop:
                return
            for row, draw in zip(rows_N.tolist(), train.draws_of_rows(rows_N, epoch).tolist(), strict=True):
                position = self._position_of_draw(index, draw)
                if position is not None and position < stop:
                    yield position, row, epoch

    def _position_of_draw(self, index: int, draw: int) -> int | None:
        return draw if len(self.sets) == 1 else self.mixture.position_of_draw(index, draw)

    def _group_by_set(self, positions_N: np.ndarray) -> Iterator[tuple[np.ndarray, TrainSet, np.ndarray]]:
        """Yields (indices into `positions_N`, set, draws of the set) for each set with a row at these positions."""
        # With a single set, the draw is the position.
        if len(self.sets) == 1:
            yield np.arange(len(positions_N)), self.sets[0], positions_N
            return
        sets_N, draws_N = self.mixture.locate_draws(positions_N)
        for index in np.unique(sets_N).tolist():
            indices = np.flatnonzero(sets_N == index)
            yield indices, self.sets[index], draws_N[indices]
