"""The batches of a run: access to data by step, and waiting for data that is still being tokenised."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import grain

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.core.piecewise import BatchSchedule
from lm_trainer.health.signals import StopRequest, preempted_error
from lm_trainer.health.watchdog import Watchdog
from lm_trainer.parallel.flags import HostFlags
from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.step.state.train_state import TrainState
from lm_trainer.trackers import Progress

_POLL_SECONDS = 0.05


class TrainData(Protocol):
    """Training data with random access by step, such as the result of `lm_trainer.data.open_data`."""

    def train(
        self, schedule: BatchSchedule, *, rows: Callable[[int], Sequence[int]], first_step: int, num_steps: int
    ) -> Iterator[Batch]:
        """Yields the batches of `num_steps` steps from `first_step` on, with only the rows `rows(batch_size)`."""
        ...


class EvalData(Protocol):
    """A held-out set for evaluation."""

    def batches(self, batch_size: int, *, rows: Sequence[int], max_batches: int | None = None) -> Iterable[Batch]:
        """Yields the selected rows of every global batch in order. The last batch is padded with rows of weight 0."""
        ...


@runtime_checkable
class Growing(Protocol):
    """Batches or a held-out set whose text may still be being tokenised."""

    @property
    def growing(self) -> bool:
        """True while text is missing. Once it is False, it remains False."""
        ...

    def missing_tokens(self) -> object | None:
        """Describes the text that the next batch waits for. Returns None if the next batch is available.

        Raises:
            UserError: if the text will never be available.
        """
        ...


@runtime_checkable
class Resumable(Protocol):
    """An iterator whose state is saved with every checkpoint, and restored when the run resumes."""

    def get_state(self) -> Any:
        """Returns the JSON-serialisable state of this process."""

    def restore_state(self, state: Any) -> None:
        """Continues from a state. Called before the first batch. Raises `UserError` if this is impossible."""


class GrainLoader:
    """Batches of a Grain pipeline. A resumed run continues at the position that was saved with the checkpoint.

    Args:
        dataset: a `grain.MapDataset`, `IterDataset` or `DataLoader` that yields the batches of this process, each of
            which is a `Batch` or a mapping with its fields.
    """

    def __init__(self, dataset: Iterable[Any]):
        # A `MapDataset` is converted to an iterator dataset, so that Grain's threads prefetch from it.
        self._dataset: Any = dataset.to_iter_dataset() if isinstance(dataset, grain.MapDataset) else dataset

    def __iter__(self) -> Iterator[Batch]:
        return _GrainIterator(iter(self._dataset))


class _GrainIterator(Iterator[Batch]):
    def __init__(self, iterator: Any):
        self._iterator = iterator

    def __next__(self) -> Batch:
        batch = next(self._iterator)
        return batch if isinstance(batch, Batch) else Batch(**batch)

    def get_state(self) -> Any:
        state = self._iterator.get_state()
        # The iterators of a `grain.DataLoader` return their state as JSON bytes.
        return {"json": json.loads(state)} if isinstance(state, bytes) else state

    def restore_state(self, state: Any) -> None:
        as_text = isinstance(self._iterator.get_state(), bytes)
        try:
            self._iterator.set_state(json.dumps(state["json"], indent=4).encode() if as_text else state)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"the loader cannot go on from the state in the checkpoint: {error}") from None


class BatchLoader:
    """Loader of the batches of a run, which can start at any step."""

    def __init__(self, start: Callable[[int], Iterator[Batch]]):
        self._start = start

    def iter_from(self, step: int) -> Iterator[Batch]:
        """Returns the batches that follow the first `step` steps."""
        return self._start(step)


def batches_from(setup: TrainingSetup, data: TrainData, step: int, num_train_steps: int) -> Iterator[Batch]:
    """Returns the batches that follow the first `step` steps, with only the rows of this process."""
    local_rows = setup.step.devices.local_rows
    plans = {plan.batch_size: plan for plan in setup.plan.microbatches.values}
    return data.train(
        setup.plan.batch_schedule,
        rows=lambda batch_size: local_rows(plans[batch_size]),
        first_step=step,
        num_steps=num_train_steps - step,
    )


class DataWait:
    """Waits for text that is being tokenised. All processes of a run wait together, so that they enter a step together.

    Args:
        stop: request to stop, which ends the wait.
        progress: shows which text is missing.
        watchdog: watchdog, which starts timing from zero whenever tokenisation advances.
        keep: saves a state. Called if the next data will never be available.
    """

    def __init__(self, stop: StopRequest, progress: Progress, watchdog: Watchdog, keep: Callable[[TrainState], object]):
        self._stop, self._progress, self._watchdog, self._keep = stop, progress, watchdog, keep
        # Asked before every step, when the devices still compute the step before.
        self._flags = HostFlags()

    def wait(self, data: object, state: TrainState) -> bool:
        """Waits until the next batch is available. Returns True if text is still being tokenised.

        Args:
            data: batches or a held-out set. The method only waits if they are `Growing` in some process.
            state: state after the last step.

        Raises:
            UserError: if the batch will never be available.
            Preempted: if a stop signal arrives first.
        """
        source = data if isinstance(data, Growing) and data.growing else None
        # This is a collective operation, which every process must enter, even if its data is complete.
        if not self._flags.combine({"growing": source is not None})["growing"]:
            return False
        shown = ""
        try:
            while (description := self._describe_missing(source, state.step)) is not None:
                if description and description != shown:
                    shown = description
                    self._progress.phase(description)
                    self._watchdog.arm(f"tokenised data after step {state.step}")
                time.sleep(_POLL_SECONDS)
        except UserError:
            # Saves the completed steps before failing.
            if state.step:
                self._keep(state)
            raise
        return True

    def _describe_missing(self, source: Growing | None, step: int) -> str | None:
        """Describes the missing text.

        Returns "" if it is missing only in other processes, and None if none is missing.
        """
        missing, failure = None, None
        try:
            missing = None if source is None else source.missing_tokens()
        except UserError as error:
            failure = error
        # All processes decide together, because otherwise one of them could enter a step without the others.
        agreed = self._flags.combine(
            {"waits": missing is not None, "fails": failure is not None, "stops": bool(self._stop.requested)}
        )
        if agreed["waits"] and agreed["stops"]:
            raise preempted_error(self._stop.requested, step)
        if agreed["fails"]:
            raise failure or UserError("another process of the run cannot read its data; it says why")
        if not agreed["waits"]:
            return None
        return "" if missing is None else str(missing)


class BatchIterator:
    """Iterates over the batches of a run, and waits until each of them is tokenised."""

    def __init__(self, batches: Iterable[Batch], data_wait: DataWait):
        self._batches: Any = iter(batches)
        self._data_wait, self._growing = data_wait, True

    def get_state(self) -> Any:
        """Returns the JSON-serialisable state of the iterator, or None if it has no state."""
        return self._batches.get_state() if isinstance(self._batches, Resumable) else None

    def restore_state(self, state: Any) -> None:
        """Continues from a saved state. A checkpoint without a state gives None, which is ignored.

        Raises:
            UserError: if the batches cannot continue from the state.
        """
        if state is not None and isinstance(self._batches, Resumable):
            self._batches.restore_state(state)

    def next(self, state: TrainState) -> Batch | None:
        """Returns the batch for the step that follows `state`, or None at the end.

        Raises the same errors as `DataWait.wait`.
        """
        # Complete data remains complete, so from then on the processes do not need to communicate.
        self._growing = self._growing and self._data_wait.wait(self._batches, state)
        return next(self._batches, None)
