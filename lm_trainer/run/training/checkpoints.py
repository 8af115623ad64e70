"""Checkpoints of a run while it trains: their times, and what is saved with the state."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import jax

from lm_trainer.checkpoint.store import KEPT, CheckpointStore
from lm_trainer.core.errors import UserError
from lm_trainer.health.watchdog import Watchdog
from lm_trainer.parallel.processes import any_process, gather_texts
from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.run.training.batches import BatchIterator
from lm_trainer.run.training.metrics import MetricLogger
from lm_trainer.run.weights.saved_state import Fingerprint, save_state
from lm_trainer.step.state.train_state import TrainState

SERIES = "series"
"""Key of the lines that the files of metrics have, as `Composite.sync` tells them."""
EMPTY_STEPS = "empty_steps"
"""Key of the number of steps in whose batch no token had a loss."""
LOADER = "loader"
"""Key of the states of the loaders of batches, one for each process."""


class Checkpoints:
    """Saves the state of a run with everything that a resume and `lmt verify` need.

    Args:
        store: where they go.
        setup: the run's.
        metrics: the losses so far.
        data_fingerprint: of the data of the first steps, as many as are given.
        facts: saved with every checkpoint, as JSON.
        watchdog: told that the run waits for a checkpoint.
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
        self._compiled = False
        self._loader_state: Callable[[], Any] = lambda: None

    def resume_loader(self, loader: BatchIterator, step: int) -> None:
        """Has a loader go on after `step` steps, and saves its state with every checkpoint from now on.

        Raises:
            UserError: when the loader cannot go on there, as when other processes had parts of it.
        """
        loader.restore_state(self._saved_loader_state(step))
        self._loader_state = loader.saved_state

    def _saved_loader_state(self, step: int) -> Any:
        """The state of this process's loader in the checkpoint of a step; None where it has none."""
        saved = self._store.record(step).get(LOADER) if step else None
        if saved is None:
            return None
        here = jax.process_count()
        # A state that is alike in all processes belongs to the step, and not to a process.
        if len(saved) != here and any(state != saved[0] for state in saved):
            raise UserError(
                f"the loader of batches was saved by {len(saved)} processes, each with a part of the data, and cannot "
                f"go on in {here}: start as many"
            )
        return saved[jax.process_index()] if len(saved) == here else saved[0]

    def due(self, step: int) -> bool:
        """True if a checkpoint is due after `step` steps, by the clock of any process: all save the same steps."""
        return any_process(self._store.due(step))

    def save(self, state: TrainState, *, keep: bool = False) -> None:
        """Starts an asynchronous save, of a permanent checkpoint with `keep`; raises as `save_state`, and for metrics
        that are not finite.
        """
        # A state whose loss was not finite must not be saved, so its metrics are read first.
        self._metrics.flush()
        self._watchdog.arm(f"the checkpoint of step {state.step}")
        record = {
            "data_fingerprint": self._data_fingerprint(state.step),
            "train_loss": self._metrics.train_loss,
            "eval_losses": self._metrics.eval_losses,
            EMPTY_STEPS: self._metrics.empty_steps,
            **self._metrics.prove(state),
            # After the fingerprint, which is a line too; the checkpoint must not be there before the lines are.
            SERIES: self._metrics.sync(),
            **({KEPT: True} if keep else {}),
            **self._loaders(),
        }
        save_state(self._store, state, self._program, {**self._facts, **record})
        if not self._compiled:
            self._compiled = True
            # The programs of the checks and hashes were compiled in that time, which is no step's.
            self._metrics.pause()

    def _loaders(self) -> dict[str, Any]:
        states = [json.loads(text) for text in gather_texts(json.dumps(self._loader_state()))]
        return {} if all(state is None for state in states) else {LOADER: states}

    def poll(self) -> None:
        """Raises `MachineError` if the save under way has failed, or another process has taken the run over."""
        self._store.poll()

    def hurry(self) -> None:
        """Has what is still to be saved done within the grace period of a stop signal, where that is limited."""
        self._store.hurry()

    def keep(self, state: TrainState) -> None:
        """Saves a state unless that has been done, and waits until it is on disk."""
        # The save under way may be that of this very state.
        self.wait()
        if state.step not in self._store.steps():
            self.save(state)
            self.wait()

    def wait(self) -> None:
        """Returns when the last save is on disk; raises `MachineError` when it failed."""
        self._store.wait()
