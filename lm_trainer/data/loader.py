"""Batches for training and evaluation, read ahead by Grain's threads.

Shape letters: B rows of this host.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import grain
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.data.shuffle import ShuffleConfig
from lm_trainer.data.stream import TokenStream
from lm_trainer.data.windows import read_windows

_THREADS, _READ_AHEAD = 2, 4


@dataclass(frozen=True)
class TrainSet:
    """The order of training: row r of step s is draw s * batch_size + r, on whatever host and device it lands."""

    stream: TokenStream
    seq_len: int
    eos_id: int
    shuffle: ShuffleConfig
    seed: int

    @property
    def num_windows(self) -> int:
        return len(self.stream) // self.seq_len

    def rows(self, step: int, batch_size: int, rows: range) -> Batch:
        """Some rows of the global batch of one step."""
        draws_B = step * batch_size + np.arange(rows.start, rows.stop, dtype=np.int64)
        windows_B = self.shuffle.locate(draws_B, self.num_windows, self.seed)
        return read_windows(self.stream, windows_B, self.seq_len, self.eos_id)


class _StepSource:
    """A random-access source for Grain: element i is this host's rows of step `first_step + i`."""

    def __init__(self, train: TrainSet, batch_size: int, rows: range, steps: range):
        self._train, self._batch_size, self._rows, self._steps = train, batch_size, rows, steps
        self.closed = threading.Event()

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: Any) -> Batch:
        if self.closed.is_set():
            raise RuntimeError("the iterator of batches has been closed")
        return self._train.rows(self._steps[int(index)], self._batch_size, self._rows)

    def __repr__(self) -> str:
        return f"steps {self._steps} of batches of {self._batch_size}, rows {self._rows}"


class TrainIterator(Iterator[Batch]):
    """The batches of consecutive steps. Close it to end its threads."""

    def __init__(self, train: TrainSet, batch_size: int, rows: range, steps: range):
        check_rows(batch_size, rows)
        self._source = _StepSource(train, batch_size, rows, steps)
        self._grain: Any = None
        if steps:
            options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_READ_AHEAD)
            self._grain = iter(grain.MapDataset.source(self._source).to_iter_dataset(options))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._grain is None:
            raise StopIteration
        return next(self._grain)

    def close(self) -> None:
        self._source.closed.set()
        if self._grain is not None:
            self._grain.close()
            self._grain = None


@dataclass(frozen=True)
class EvalSet:
    """All of a held-out set in order, each token once."""

    name: str
    stream: TokenStream
    seq_len: int
    eos_id: int
    num_documents: int
    text_bytes: int
    """UTF-8 bytes of the text, for bits per byte."""

    @property
    def num_tokens(self) -> int:
        return len(self.stream)

    @property
    def num_windows(self) -> int:
        return -(-len(self.stream) // self.seq_len)

    def num_batches(self, batch_size: int) -> int:
        return -(-self.num_windows // batch_size)

    def batches(self, batch_size: int, *, rows: range, max_batches: int | None = None) -> Iterator[Batch]:
        """This host's rows of each global batch; where the set ends, rows are padding: weight 0 and segment -1."""
        check_rows(batch_size, rows)
        count = self.num_batches(batch_size)
        for index in range(count if max_batches is None else min(count, max_batches)):
            windows_B = index * batch_size + np.arange(rows.start, rows.stop, dtype=np.int64)
            yield read_windows(self.stream, windows_B, self.seq_len, self.eos_id)


def check_rows(batch_size: int, rows: range) -> None:
    if rows.step != 1 or not 0 <= rows.start < rows.stop <= batch_size:
        raise UserError(f"rows {rows} are no part of a batch of {batch_size}")
