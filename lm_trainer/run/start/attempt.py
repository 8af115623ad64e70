"""One attempt at a run, with the resources that it holds from its beginning to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax

from lm_trainer.checkpoint.store import CheckpointStore
from lm_trainer.core.config import Config
from lm_trainer.core.errors import UserError
from lm_trainer.core.runtime import configure_jax
from lm_trainer.health.peer_failure import join_processes
from lm_trainer.health.signals import SaveRequests, StopRequest
from lm_trainer.health.watchdog import Watchdog
from lm_trainer.parallel.kept_programs import keep_programs
from lm_trainer.run.build.setup import TrainingSetup, check_devices
from lm_trainer.run.build.startup_notes import configuration_warnings
from lm_trainer.run.config.predicted_run import check_prediction
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.files.directory import PROGRAMS, RunDirectory
from lm_trainer.run.files.failed_start import RemoveFailedStart
from lm_trainer.run.start.agreement import check_agreement, check_data_agreement
from lm_trainer.run.weights.initial_weights import StartRequest, load_initial_state
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
    process_names: Sequence[str]
    """Names of the processes of the run; empty for a single process."""
    started: float
    """Start time of the attempt, in seconds of `time.perf_counter`."""

    def load_state(
        self,
        setup: TrainingSetup,
        init: Callable[[], TrainState],
        fingerprint: Callable[[int], Fingerprint],
        *,
        config: TrainerConfig | None = None,
    ) -> TrainState:
        """Returns the state to continue from, and reports its step to the user.

        Args:
            setup: model, optimizer, shardings and compiled functions of the run.
            init: creates the state of a run that loads no weights.
            fingerprint: returns the fingerprint of the data for a number of steps.
            config: trainer section that names the checkpoints to load; None means the trainer section of the attempt.

        Raises:
            UserError: as for `check_data_agreement` and `load_initial_state`.
        """
        # A single process has no other process to compare with, so its data does not need to be hashed.
        if jax.process_count() > 1:
            for note in check_data_agreement(fingerprint(self.config.num_train_steps)):
                self.progress.note(note)
        allow, branch = self.directory.allow_change, self.directory.branch
        state, record = load_initial_state(
            StartRequest(config or self.config, setup, self.store, init, fingerprint, allow, branch)
        )
        if branch is not None and state.step < branch.step:
            raise UserError(
                f"{self.directory.name}: the checkpoint of step {branch.step}, with which the branch begins, is gone; "
                f"`lmt branch {branch.parent} --at {branch.step} {self.directory.name}`, with the same changes, makes "
                f"it again"
            )
        # The fingerprint covers all steps, including the steps of a run from whose checkpoint this run started.
        self.directory.chain = record.get("chain", "")
        if branch is not None and state.step == branch.step:
            for note in branch.notes():
                self.progress.note(note)
        if state.step:
            self.progress.note(f"resumed at step {state.step} of {self.config.num_train_steps}")
        if extra_permanent := self.store.extra_permanent_note():
            self.progress.note(extra_permanent)
        for note in configuration_warnings(self.config, setup.sharding.mesh):
            self.progress.note(note)
        return state


@contextmanager
def open_attempt(
    config: TrainerConfig, settings: Config, progress: Progress, *, allow_config_change: bool = False
) -> Iterator[Attempt]:
    """Context manager that configures JAX, connects the processes of the run, and locks the run directory.

    Args:
        config: the `trainer` section, whose `id` names the run.
        settings: complete configuration of the run, with `config` as one of its sections.
        progress: progress display in the terminal.
        allow_config_change: continue a run that was started with another configuration or other data.

    Raises:
        UserError: if the run directory is in use or belongs to another run, the configuration does not fit the devices,
            or the processes have different configurations.
    """
    started = time.perf_counter()
    directory = RunDirectory(
        config, settings, config.id or "run", allow_change=allow_config_change, on_wait=progress.phase
    )
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        save_requests = stack.enter_context(SaveRequests(directory.path))
        # Must come before any other use of JAX, because the first use fixes the platform and the devices.
        configure_jax(config.jax_config, config.jax_compilation_cache_dir, directory.num_cpu_threads(config))
        failure_detector = stack.enter_context(join_processes(config.distributed, progress))
        directory.restore_recorded_keys()
        config = directory.trainer
        # Comes before the directory is created, so that a configuration that does not fit the devices leaves no files.
        check_devices(config)
        check_prediction(directory.config)
        for note in check_agreement(directory.config):
            progress.note(note)
        # Entered before the directory, so that a failure before the first step leaves no files.
        paths = (directory.path, directory.checkpoints)
        stack.enter_context(RemoveFailedStart(*(path for path in paths if isinstance(path, Path))))
        try:
            stack.enter_context(directory)
        finally:
            # The notes are also shown if an error is raised after records were restored.
            for note in directory.notes:
                progress.note(note)
        if keeps_programs(config):
            stack.enter_context(keep_programs(directory.path / PROGRAMS, progress.note))
        # The store is closed before the directory, so that the lock is held until the last save is complete.
        checkpointer = CheckpointStore(directory.checkpoints, config.checkpointer, directory)
        store = stack.enter_context(closing(checkpointer))
        watchdog = stack.enter_context(Watchdog(config.watchdog, directory.path))
        # A failure is reported first, because closing the other resources would wait for the other processes.
        stack.push(failure_detector.report)
        names = failure_detector.process_names
        yield Attempt(config, directory, store, stop, save_requests, watchdog, progress, names, started)


def keeps_programs(config: TrainerConfig) -> bool:
    """Returns true if the run keeps its compiled programs."""
    # CPU programs do not depend on timing, and JAX's compilation cache already saves most of the time.
    by_default = jax.default_backend() != "cpu"
    return by_default if config.keep_programs is None else config.keep_programs
