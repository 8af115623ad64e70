"""The batches of a run: data by step, and the wait for those that are still being tokenised."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import grain
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.core.piecewise import BatchSchedule
from lm_trainer.health.signals import StopRequest, preempted
from lm_trainer.health.watchdog import Watchdog
from lm_trainer.parallel.processes import any_process, gather
from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.step.state.train_state import TrainState
from lm_trainer.trackers import Progress

_POLL_SECONDS = 0.05


class TrainData(Protocol):
    """Batches by their number: what `lm_trainer.data.open_data` returns, or anything like it."""

    def train(
        self, schedule: BatchSchedule, *, rows: Callable[[int], Sequence[int]], first_step: int, num_steps: int
    ) -> Iterator[Batch]:
        """The batches of `num_steps` steps from `first_step`: of each the rows that `rows(batch size)` names."""
        ...


class EvalData(Protocol):
    """A held-out set."""

    def batches(self, batch_size: int, *, rows: Sequence[int], max_batches: int | None = None) -> Iterable[Batch]:
        """Some rows of every global batch, in order; the end is filled up with rows of weight 0."""
        ...


@runtime_checkable
class Growing(Protocol):
    """Batches, or a held-out set, of which some may still be tokenised."""

    @property
    def growing(self) -> bool:
        """Once False, it stays so, and nothing is missing any more."""
        ...

    def missing(self) -> object | None:
        """Describes the text that the next batch waits for; None if it is there.

        Raises:
            UserError: if it will not come.
        """
        ...


@runtime_checkable
class Resumable(Protocol):
    """An iterator whose state is saved with every checkpoint, and given back on resume."""

    def saved_state(self) -> Any:
        """The state, as JSON, of this process."""

    def restore_state(self, state: Any) -> None:
        """Goes on from a state, before the first batch; raises `UserError` where that cannot be."""


class GrainLoader:
    """The batches of a pipeline of Grain, from its beginning on, or after a resume from where the checkpoint was.

    Args:
        dataset: a `grain.MapDataset`, `IterDataset` or `DataLoader` of batches of this process: a `Batch`, or a mapping
            of its fields.
    """

    def __init__(self, dataset: Iterable[Any]):
        # A random-access dataset is read ahead by Grain's threads.
        self._dataset: Any = dataset.to_iter_dataset() if isinstance(dataset, grain.MapDataset) else dataset

    def __iter__(self) -> Iterator[Batch]:
        return _GrainIterator(iter(self._dataset))


class _GrainIterator(Iterator[Batch]):
    def __init__(self, iterator: Any):
        self._iterator = iterator

    def __next__(self) -> Batch:
        batch = next(self._iterator)
        return batch if isinstance(batch, Batch) else Batch(**batch)

    def saved_state(self) -> Any:
        state = self._iterator.get_state()
        # Iterators of a `grain.DataLoader` write JSON themselves.
        return {"json": json.loads(state)} if isinstance(state, bytes) else state

    def restore_state(self, state: Any) -> None:
        as_text = isinstance(self._iterator.get_state(), bytes)
        try:
            self._iterator.set_state(json.dumps(state["json"], indent=4).encode() if as_text else state)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"the loader cannot go on from the state in the checkpoint: {error}") from None


class BatchLoader:
    """The batches of a run from any step on."""

    def __init__(self, start: Callable[[int], Iterator[Batch]]):
        self._start = start

    def iter_from(self, step: int) -> Iterator[Batch]:
        """The batches of the steps after `step` steps."""
        return self._start(step)


def batches_from(setup: TrainingSetup, data: TrainData, step: int, num_train_steps: int) -> Iterator[Batch]:
    """The batches of the steps after `step` steps, of each the rows that this process needs."""
    local_rows = setup.step.devices.local_rows
    plans = {plan.batch_size: plan for plan in setup.plan.microbatches.values}
    return data.train(
        setup.plan.batch_schedule,
        rows=lambda batch_size: local_rows(plans[batch_size]),
        first_step=step,
        num_steps=num_train_steps - step,
    )


class DataWait:
    """Waits for text that is being tokenised, in all processes of a run alike: none is left alone in the next step.

    Args:
        stop: ends the waiting.
        progress: shows what is waited for.
        watchdog: told whenever there is more of it.
        keep: saves a state, when what comes after it does not come.
    """

    def __init__(self, stop: StopRequest, progress: Progress, watchdog: Watchdog, keep: Callable[[TrainState], object]):
        self._stop, self._progress, self._watchdog, self._keep = stop, progress, watchdog, keep

    def wait(self, data: object, state: TrainState) -> bool:
        """Returns when the next batch is there: True while text is still being tokenised.

        Args:
            data: nothing is waited for unless it is `Growing`, in any process.
            state: after the last step.

        Raises:
            UserError: if the batch will not come.
            Preempted: when a stop signal comes first.
        """
        source = data if isinstance(data, Growing) and data.growing else None
        # A collective, which every process enters, also one that misses nothing.
        if not any_process(source is not None):
            return False
        shown = ""
        try:
            while (what := self._look(source, state.step)) is not None:
                if what and what != shown:
                    shown = what
                    self._progress.phase(what)
                    self._watchdog.arm(f"tokenised data after step {state.step}")
                time.sleep(_POLL_SECONDS)
        except UserError:
            # The steps that were done are worth more than the data that do not come.
            if state.step:
                self._keep(state)
            raise
        return True

    def _look(self, source: Growing | None, step: int) -> str | None:
        """Describes the missing text, "" if it is missing only in another process; None if nothing is."""
        missing, failure = None, None
        try:
            missing = None if source is None else source.missing()
        except UserError as error:
            failure = error
        # All processes decide by what any of them found, or one would go on into a step alone.
        flags = [missing is not None, failure is not None, bool(self._stop.requested)]
        waits, fails, stops = gather(np.asarray(flags, np.int32)).max(axis=0)
        if waits and stops:
            raise preempted(self._stop.requested, step)
        if fails:
            raise failure or UserError("another process of the run cannot read its data; it says why")
        if not waits:
            return None
        return "" if missing is None else str(missing)


class BatchIterator:
    """The batches of a run one after another, each as soon as it is tokenised."""

    def __init__(self, batches: Iterable[Batch], data_wait: DataWait):
        self._batches: Any = iter(batches)
        self._data_wait, self._growing = data_wait, True

    def saved_state(self) -> Any:
        """The state of the iterator, as JSON; None where it has none."""
        return self._batches.saved_state() if isinstance(self._batches, Resumable) else None

    def restore_state(self, state: Any) -> None:
        """Goes on from a saved state; None, of a checkpoint without one, changes nothing.

        Raises:
            UserError: where the batches cannot go on there.
        """
        if state is not None and isinstance(self._batches, Resumable):
            self._batches.restore_state(state)

    def next(self, state: TrainState) -> Batch | None:
        """The batch of the step from this state; None at the end. Raises as `DataWait.wait`."""
        # Data that have stopped growing never grow again: from then on no process asks the others.
        self._growing = self._growing and self._data_wait.wait(self._batches, state)
        return next(self._batches, None)
