"""Where a run's batches come from, as far as the loop is concerned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from lm_trainer.core.batch import Batch
from lm_trainer.core.steps import BatchSchedule


class TrainData(Protocol):
    """Batches by their number: what `lm_trainer.data.open_data` returns, or anything like it."""

    def train(
        self, schedule: BatchSchedule, *, rows: Callable[[int], range], first_step: int, num_steps: int
    ) -> Iterator[Batch]:
        """The batches of `num_steps` steps from `first_step`: of each the rows that `rows(batch size)` names."""
        ...


class EvalData(Protocol):
    """A held-out set."""

    def batches(self, batch_size: int, *, rows: range, max_batches: int | None = None) -> Iterable[Batch]:
        """Some rows of every global batch, in order; the end is filled up with rows of weight 0."""
        ...


class Loader:
    """The batches of a run from any step on."""

    def __init__(self, start: Callable[[int], Iterator[Batch]]):
        self._start = start

    def iter_from(self, step: int) -> Iterator[Batch]:
        """The batches of the steps after `step` steps."""
        return self._start(step)
