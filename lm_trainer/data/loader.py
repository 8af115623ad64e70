"""Reads the rows and batches of a run through Grain.

Element i of the source holds this host's rows of one step, so a run can start at any step at the same cost, and each
batch is read as a unit. The rows of a step never depend on which batches were read earlier.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, SupportsIndex

import grain
import jax
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.core.piecewise import BatchSchedule
from lm_trainer.data.rows.eval_set import check_rows
from lm_trainer.data.rows.grain_rows import GrainRows
from lm_trainer.data.rows.growing_order import GrowingOrder
from lm_trainer.data.rows.order import TrainOrder
from lm_trainer.data.rows.worker import free_shared_memory, read_in_processes
from lm_trainer.data.tokenize.open_cache import MissingTokens

HostRows = Sequence[int] | Callable[[int], Sequence[int]]
"""Numbers of this host's rows in the global batch. If the batch size changes, a function of the size."""

# One thread reads while the other waits for a disk. Prefetching more batches does not make steps faster.
_THREADS, _PREFETCHED = 2, 4


class _StepSource:
    """Random-access source for Grain, whose element i has this host's rows of step `steps[i]`."""

    def __init__(
        self,
        order: TrainOrder | GrowingOrder,
        schedule: BatchSchedule,
        rows: Callable[[int], Sequence[int]],
        steps: range,
        closed: threading.Event,
    ):
        self._order, self._schedule, self._steps, self._closed = order, schedule, steps, closed
        self._rows = {size: np.asarray(rows(size), np.int64) for size in schedule.sizes.values}

    def __getstate__(self) -> dict[str, object]:
        # A worker process ends on its own, so it does not need the event.
        return {**self.__dict__, "_closed": None}

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: SupportsIndex) -> Batch:
        if self._closed is not None and self._closed.is_set():
            raise RuntimeError("the iterator of batches has been closed")
        return self._order.read(self._row_positions(int(index)))

    def missing_tokens(self, index: int) -> MissingTokens | None:
        """Describes the tokens that element `index` needs but that are not tokenised yet."""
        if not isinstance(self._order, GrowingOrder) or index >= len(self):
            return None
        return self._order.missing_tokens(self._row_positions(index))

    def _row_positions(self, index: int) -> np.ndarray:
        step = self._steps[index]
        return self._schedule.rows_before(step) + self._rows[self._schedule.at(step)]

    def __repr__(self) -> str:
        return f"steps {self._steps} of {self._schedule}"


class _RowSource:
    """Random-access source for Grain, whose element i is row i of the run, regardless of its step."""

    def __init__(self, order: TrainOrder):
        self._order = order

    def __len__(self) -> int:
        # Follows the convention of Grain's own infinite datasets.
        return sys.maxsize if self._order.length is None else self._order.length

    def __getitem__(self, index: SupportsIndex) -> Batch:
        return jax.tree.map(lambda x: x[0], self._order.read(np.array([int(index)])))

    def __repr__(self) -> str:
        return f"rows of {', '.join(train.name for train in self._order.sets)}"


def row_dataset(order: TrainOrder) -> grain.MapDataset[Batch]:
    """Returns the rows of a final order as a Grain dataset."""
    return grain.MapDataset.source(_RowSource(order))


def _num_worker_processes(order: TrainOrder | GrowingOrder) -> int:
    """Returns the number of worker processes that the user's pipelines request."""
    if not isinstance(order, TrainOrder):
        return 0
    counts = [train.rows.source.worker_processes for train in order.sets if isinstance(train.rows, GrainRows)]
    return max(counts, default=0)


class TrainIterator(Iterator[Batch]):
    """Iterator over the batches of consecutive steps. Call `close` to end its threads.

    Args:
        order: the rows of the run by their positions.
        schedule: number of rows of the global batch at each step.
        rows: numbers of this host's rows in the global batch.
        steps: the steps to read, counted from 0.
        closed: event that `close` sets, which ends threads that wait for text still being tokenised.

    Raises:
        UserError: if a batch does not have these rows.
    """

    def __init__(
        self,
        order: TrainOrder | GrowingOrder,
        schedule: BatchSchedule,
        rows: HostRows,
        steps: range,
        closed: threading.Event | None = None,
    ):
        if not callable(rows) and len(set(schedule.sizes.values)) > 1:
            raise UserError("the batch size changes, so the rows of this host must be given as a function of it")
        host_rows = rows if callable(rows) else lambda _: rows
        for size in schedule.sizes.values:
            check_rows(size, host_rows(size))
        self._order, self._schedule, self._steps, self._taken = order, schedule, steps, 0
        self._closed = closed or threading.Event()
        self._source = _StepSource(order, schedule, host_rows, steps, self._closed)
        self._grain: grain.DatasetIterator[Batch] | None = None
        self._shared = _num_worker_processes(order)
        if steps:
            options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_PREFETCHED)
            dataset = grain.MapDataset.source(self._source).to_iter_dataset(options)
            if self._shared:
                dataset = read_in_processes(dataset, self._shared)
            self._grain = iter(dataset)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._grain is None:
            raise StopIteration
        batch = next(self._grain)
        self._taken += 1
        # Copied out of the memory shared with the workers, because they reuse it.
        return jax.tree.map(np.array, batch) if self._shared else batch

    @property
    def growing(self) -> bool:
        """True if a batch may have to wait for text that is still being tokenised."""
        return isinstance(self._order, GrowingOrder) and self._order.growing

    def missing_tokens(self) -> MissingTokens | None:
        """Describes the tokens for which the next batch waits; None if `next` does not have to wait for tokenising.

        Raises:
            UserError: if they will never arrive because the build of their cache failed.
        """
        return self._source.missing_tokens(self._taken)

    def get_state(self) -> dict[str, object]:
        """Returns the next step, counted from 0, and the states of pipelines, in the format of Grain's iterators."""
        return {"next_index": self._steps.start + self._taken, **self._pipeline_states()}

    def _pipeline_states(self) -> dict[str, object]:
        """Returns the states of sets that are read sequentially, each at its next row."""
        if not isinstance(self._order, TrainOrder):
            return {}
        step = self._steps.start + self._taken
        next_rows = self._order.upcoming_rows(self._schedule.rows_before(step))
        states = {name: rows.state_before(row) for name, rows, row in next_rows if isinstance(rows, GrainRows)}
        saved_states = {name: state for name, state in states.items() if state is not None}
        return {"rows": saved_states} if saved_states else {}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Checks a saved state against the iterator's next step, and restores the states of pipelines.

        Raises:
            UserError: if the state is from another step.
        """
        next_step = self._steps.start + self._taken
        if state.get("next_index") != next_step:
            raise UserError(
                f"the batches go on after step {next_step}, but the loader was saved after step "
                f"{state.get('next_index')}: the checkpoint has been put together from two"
            )
        if isinstance(self._order, TrainOrder):
            states = state.get("rows", {})
            for train in self._order.sets:
                if isinstance(train.rows, GrainRows) and train.name in states:
                    train.rows.restore(states[train.name])

    def close(self) -> None:
        """Ends the threads. Threads that wait for text are ended first, since Grain joins them."""
        self._closed.set()
        if self._grain is not None:
            self._grain.close()
            self._grain = None
            free_shared_memory()
