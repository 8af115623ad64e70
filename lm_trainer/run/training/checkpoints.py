"""Checkpoints of a run during training: when they are saved, and the record that is saved with the state."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from lm_trainer.checkpoint.store import PERMANENT_KEY, CheckpointStore
from lm_trainer.core.errors import UserError
from lm_trainer.health.watchdog import Watchdog
from lm_trainer.parallel.processes import gather_texts
from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.run.training.batches import BatchIterator
from lm_trainer.run.training.metrics import MetricLogger
from lm_trainer.run.weights.saved_state import Fingerprint, compile_hashing, save_state
from lm_trainer.step.state.train_state import TrainState

SERIES = "series"
"""Key of the lines that the metrics files contain, from `Composite.sync`."""
EMPTY_STEPS = "empty_steps"
"""Key of the number of steps in whose batch no token had a loss."""
LOADER = "loader"
"""Key of the states of the batch loaders, one per process."""


class Checkpoints:
    """Saves the state of a run with everything needed to resume the run and for `lmt verify`.

    Args:
        store: the checkpoint store.
        setup: model, optimizer, shardings and compiled functions of the run.
        metrics: metric logger, which knows the losses so far.
        data_fingerprint: returns the fingerprint of the data for a number of steps.
        facts: JSON values that are saved with every checkpoint.
        watchdog: watchdog that times the wait for a checkpoint.
    """

    def __init__(
        self,
        store: CheckpointStore,
        setup: TrainingSetup,
        metrics: MetricLogger,
        data_fingerprint: Callable[[int], Fingerprint],
        facts: Mapping[str, Any],
        watchdog: Watchdog,
    ):
        self._store, self._program, self._metrics = store, setup, metrics
        self._data_fingerprint, self._facts, self._watchdog = data_fingerprint, facts, watchdog
        self._compilation: Future[None] | None = None
        self._saved = False
        self._loader_state: Callable[[], Any] = lambda: None

    def resume_loader(self, loader: BatchIterator, step: int) -> None:
        """Restores the state of a loader at `step`, and saves its state with every checkpoint from now on.

        Raises:
            UserError: if the loader cannot continue, for example with a different number of processes.
        """
        loader.restore_state(self._read_loader_state(step))
        self._loader_state = loader.get_state

    def _read_loader_state(self, step: int) -> Any:
        """Returns the state of this process's loader in the checkpoint of a step, or None if there is none."""
        saved = self._store.read_record(step).get(LOADER) if step else None
        if saved is None:
            return None
        processes = jax.process_count()
        # A state that is equal in all processes depends only on the step, so it fits any number of processes.
        if len(saved) != processes and any(state != saved[0] for state in saved):
            raise UserError(
                f"the loader of batches was saved by {len(saved)} processes, each with a part of the data, and cannot "
                f"go on in {processes}: start as many"
            )
        return saved[jax.process_index()] if len(saved) == processes else saved[0]

    def start_compiling(self) -> None:
        """Starts to compile the programs that check and hash a state, in another thread, while training goes on."""
        if self._compilation is None:
            executor = ThreadPoolExecutor(1, "compile hashes")
            self._compilation = executor.submit(compile_hashing, self._program)
            executor.shutdown(wait=False)

    def is_due(self, step: int) -> bool:
        """Returns True if a permanent checkpoint is due after `step` steps. The result is the same in all processes."""
        return self._store.is_permanent(step)

    def is_overdue(self) -> bool:
        """Returns True if a temporary checkpoint is due according to the clock of this process."""
        return self._store.is_overdue()

    def save(self, state: TrainState, *, keep: bool = False) -> None:
        """Starts to save a checkpoint asynchronously.

        Args:
            state: the state to save.
            keep: True for a permanent checkpoint.

        Raises:
            NonFiniteError: if a metric or a parameter is not finite.
            MachineError: if this or the previous save failed.
        """
        self._begin(f"the checkpoint of step {state.step}")
        record = {**self._metrics.record_fingerprint(state), **({PERMANENT_KEY: True} if keep else {})}
        self._save(state, record)

    def is_copy_due(self, step: int) -> bool:
        """Returns True if a copy in memory is due after `step` steps. The result is the same in all processes."""
        return self._store.is_copy_due(step)

    def save_copy(self, state: TrainState) -> None:
        """Starts to save a copy of the state in the memory of the machines. Raises the same errors as `save`."""
        self._begin(f"the copy of step {state.step} in memory")
        self._save(state, {"chain": self._metrics.chain}, in_memory=True)

    def _begin(self, save: str) -> None:
        # A state with a non-finite loss must not be saved, so its metrics are read first.
        self._metrics.flush()
        self._watchdog.arm(save)
        if self._compilation is not None:
            self._compilation.result()

    def _save(self, state: TrainState, record: Mapping[str, Any], *, in_memory: bool = False) -> None:
        record = {
            "data_fingerprint": self._data_fingerprint(state.step),
            "train_loss": self._metrics.train_loss,
            "eval_losses": self._metrics.eval_losses,
            EMPTY_STEPS: self._metrics.empty_steps,
            **record,
            # This comes after the fingerprint, which is also a line. The lines must be on disk before the checkpoint.
            SERIES: self._metrics.sync(),
            **self._loader_states(),
        }
        save_state(self._store, state, self._program, {**self._facts, **record}, in_memory=in_memory)
        if not self._saved:
            self._saved = True
            # Excludes a wait for the programs from the step time.
            self._metrics.pause()

    def _loader_states(self) -> dict[str, Any]:
        states = [json.loads(text) for text in gather_texts(json.dumps(self._loader_state()))]
        return {} if all(state is None for state in states) else {LOADER: states}

    def check_for_errors(self) -> None:
        """Raises `MachineError` if the save in progress has failed, or another process has taken over the run."""
        self._store.check_for_errors()

    def start_grace_period(self) -> None:
        """Limits the remaining saves to the grace period after a stop signal, if the storage has one."""
        self._store.start_grace_period()

    def ensure_saved(self, state: TrainState) -> None:
        """Saves a state unless it has already been saved, and waits until the save is complete."""
        # The save in progress may be a save of this state.
        self.wait()
        if state.step not in self._store.steps():
            self.save(state)
            self.wait()

    def save_before_batch(self, state: TrainState, loader_state: Any) -> None:
        """Same as `ensure_saved`, for a state whose next batch was already read. The run must end after it.

        Args:
            state: the state to save.
            loader_state: state of this process's loader before the batch.
        """
        self._loader_state = lambda: loader_state
        self.ensure_saved(state)

    def wait(self) -> None:
        """Waits until the last save is complete. Raises `MachineError` if it failed."""
        self._store.wait()
