"""One attempt at a run: everything that is held from its beginning to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax

from lm_trainer.checkpoint.store import CheckpointStore
from lm_trainer.core.config import Config
from lm_trainer.core.runtime import configure_jax
from lm_trainer.health.peer_failure import join_processes
from lm_trainer.health.signals import SaveRequests, StopRequest
from lm_trainer.health.watchdog import Watchdog
from lm_trainer.run.build.setup import TrainingSetup, check_devices
from lm_trainer.run.build.startup_notes import configuration_warnings
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.files.directory import RunDirectory
from lm_trainer.run.files.failed_start import RemoveFailedStart
from lm_trainer.run.start.agreement import check_agreement, check_data
from lm_trainer.run.weights.initial_weights import Request, find_start
from lm_trainer.run.weights.saved_state import Fingerprint
from lm_trainer.step.state.train_state import TrainState
from lm_trainer.trackers import Progress


@dataclass(frozen=True)
class Attempt:
    """The directory, checkpoints, signals and watchdog of an attempt; see `open_attempt`."""

    config: TrainerConfig
    directory: RunDirectory
    store: CheckpointStore
    stop: StopRequest
    save_requests: SaveRequests
    watchdog: Watchdog
    progress: Progress
    started: float
    """The time at which it began, in seconds of `time.perf_counter`."""

    def start(
        self,
        setup: TrainingSetup,
        init: Callable[[], TrainState],
        fingerprint: Callable[[int], Fingerprint],
        *,
        config: TrainerConfig | None = None,
    ) -> TrainState:
        """The state to go on from; tells the person at the terminal where that is.

        Args:
            setup: the run's.
            init: makes the state of a run that loads nothing.
            fingerprint: of the data of the first steps, as many as are given.
            config: names what may be loaded, where that is not the attempt's own configuration.

        Raises:
            UserError: as `check_data` and `find_start`.
        """
        # One process alone has nothing to compare, and would hash its data for nothing.
        if jax.process_count() > 1:
            for note in check_data(fingerprint(self.config.num_train_steps)):
                self.progress.note(note)
        allow = self.directory.allow_change
        state, record = find_start(Request(config or self.config, setup, self.store, init, fingerprint, allow))
        # The fingerprint covers all steps: of a branch those of the run that it goes on from, too.
        self.directory.chain = record.get("chain", "")
        if state.step:
            self.progress.note(f"resumed at step {state.step} of {self.config.num_train_steps}")
        if promised := self.store.promise_note():
            self.progress.note(promised)
        for note in configuration_warnings(self.config, setup.sharding.mesh):
            self.progress.note(note)
        return state


@contextmanager
def open_attempt(
    config: TrainerConfig, settings: Config, progress: Progress, *, allow_config_change: bool = False
) -> Iterator[Attempt]:
    """Sets up JAX, joins the processes of the run, and takes hold of its directory.

    Args:
        config: the `trainer` section; its `id` names the run.
        settings: all that decides the run, with `config` as one of its sections.
        progress: the person at the terminal.
        allow_config_change: go on with a run that was begun with another configuration or other data.

    Raises:
        UserError: when the run directory is in use or holds another run, the devices do not fit, or the processes have
            different configurations.
    """
    started = time.perf_counter()
    directory = RunDirectory(
        config, settings, config.id or "run", allow_change=allow_config_change, waiting=progress.phase
    )
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        save_requests = stack.enter_context(SaveRequests(directory.path))
        # Before anything else uses JAX, which fixes platform and devices at its first use.
        configure_jax(config.jax_config, config.jax_compilation_cache_dir, directory.cpu_threads(config))
        failure_detector = stack.enter_context(join_processes(config.distributed, progress))
        directory.go_on_as_begun()
        config = directory.trainer
        # Before the directory is made, so that a configuration that does not fit the devices leaves nothing behind.
        check_devices(config)
        for note in check_agreement(directory.config):
            progress.note(note)
        # Around the directory: what failed before the first step leaves nothing.
        places = (directory.path, directory.checkpoints)
        stack.enter_context(RemoveFailedStart(*(place for place in places if isinstance(place, Path))))
        try:
            stack.enter_context(directory)
        finally:
            # Also where it is refused, after records have been put back.
            for note in directory.notes:
                progress.note(note)
        # Closed before the directory: its lock is held until the last save is on disk.
        checkpointer = CheckpointStore(directory.checkpoints, config.checkpointer, directory)
        store = stack.enter_context(closing(checkpointer))
        watchdog = stack.enter_context(Watchdog(config.watchdog, directory.path))
        # The first to hear of a failure: whatever is closed after it would wait for the other processes.
        stack.push(failure_detector.report)
        yield Attempt(config, directory, store, stop, save_requests, watchdog, progress, started)
