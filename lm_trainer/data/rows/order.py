"""The order of training: which row of which set stands at each position of the run.

Shape letters: B rows of a batch, N positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.data.mixture import Mixture
from lm_trainer.data.rows.chunks import Windows, read_together
from lm_trainer.data.shuffle import ShuffleConfig


class Rows(Protocol):
    """Rows of one length, each of which can be read alone."""

    @property
    def seq_len(self) -> int: ...

    @property
    def num_rows(self) -> int: ...

    def read(self, rows_B: np.ndarray) -> Batch:
        """Some of the rows, each number in [0, num_rows)."""
        ...

    def spans(self, row: int) -> list[tuple[int, int]]:
        """(start in the stream, number of inputs) of each run of tokens that a row holds."""
        ...


@dataclass(frozen=True)
class TrainSet:
    """One set and the order of its rows."""

    name: str
    rows: Rows
    num_rows: int
    """Rows in an epoch: the first so many of `rows`."""
    shuffle: ShuffleConfig
    seed: int
    final: bool = True
    """False while the set grows: then so many rows of the epoch are certain, and more may come."""

    def locate(self, draws_N: np.ndarray) -> np.ndarray:
        """Which row each draw is: int64 [N]."""
        return self.shuffle.locate(draws_N, self.num_rows, self.seed)


class Origin(NamedTuple):
    """Where the row at one position comes from."""

    set: TrainSet
    row: int
    """Number of the row within the set."""
    epoch: int
    """Of the set, from 0."""


@dataclass(frozen=True)
class TrainOrder:
    """Row r of the step that begins at position p is what stands at p + r, on whatever host and device it lands."""

    sets: Sequence[TrainSet]
    mixture: Mixture
    length: int | None = None
    """Positions until the stop rule ends training; None = it never does."""

    def read(self, positions_B: np.ndarray) -> Batch:
        """The rows at some positions."""
        parts = [(here, train.rows, train.locate(draws)) for here, train, draws in self._by_set(positions_B)]
        if len(parts) == 1:
            return parts[0][1].read(parts[0][2])
        windows = [(here, rows, numbers) for here, rows, numbers in parts if isinstance(rows, Windows)]
        if len(windows) == len(parts):
            return read_together(windows)
        found = [(here, rows.read(numbers)) for here, rows, numbers in parts]
        batch = Batch(*(np.empty((len(positions_B), *field.shape[1:]), field.dtype) for field in found[0][1]))
        for here, part in found:
            for whole, field in zip(batch, part, strict=True):
                np.asarray(whole)[here] = field
        return batch

    def unsettled(self, positions_N: np.ndarray, *, whole: bool = False) -> tuple[TrainSet, int | None] | None:
        """A set that must grow before the rows at some positions are certain, and to how many rows (None = to all).

        Args:
            positions_N: int64 [N].
            whole: whether every set has to be complete.

        Returns:
            None if there is no such set.
        """
        growing = [train for train in self.sets if not train.final]
        if growing and whole:
            return growing[0], None
        for _, train, draws_N in self._by_set(positions_N) if growing else ():
            rows = None if train.final else train.shuffle.rows_needed(int(draws_N.max()))
            if not train.final and (rows is None or rows > train.num_rows):
                return train, rows
        return None

    def origins(self, positions_N: np.ndarray) -> list[Origin]:
        """Where the rows at some positions come from, in their order."""
        found: dict[int, Origin] = {}
        for here, train, draws in self._by_set(positions_N):
            epochs, rows = draws // train.num_rows, train.locate(draws)
            for place, row, epoch in zip(here.tolist(), rows.tolist(), epochs.tolist(), strict=True):
                found[place] = Origin(train, row, epoch)
        return [found[place] for place in range(len(positions_N))]

    def _by_set(self, positions_N: np.ndarray) -> Iterator[tuple[np.ndarray, TrainSet, np.ndarray]]:
        """(places in `positions_N`, set, draws of the set) for each set among the positions."""
        if len(self.sets) == 1:
            yield np.arange(len(positions_N)), self.sets[0], positions_N
            return
        sets_N, draws_N = self.mixture.locate(positions_N)
        for index in np.unique(sets_N).tolist():
            here = np.flatnonzero(sets_N == index)
            yield here, self.sets[index], draws_N[here]
