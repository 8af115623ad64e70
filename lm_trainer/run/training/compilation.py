"""Compiles the training step at its first batch, and records the compiled program."""

from __future__ import annotations

import time

from lm_trainer.core.batch import Batch
from lm_trainer.health.watchdog import Watchdog
from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.files.artifacts import Artifacts
from lm_trainer.run.files.directory import RunDirectory
from lm_trainer.run.files.environment import GRAPH, PROGRAM
from lm_trainer.run.start.agreement import check_program_agreement
from lm_trainer.step.dispatch.executable import Executable, Executables
from lm_trainer.step.state.train_state import TrainState
from lm_trainer.step.updates.norms import Watcher
from lm_trainer.trackers import Progress


class Compilation:
    """Compiles the step for every new batch size, and records the first program of an attempt.

    Args:
        config: trainer section, which contains the options for writing the program to files.
        setup: model, optimizer, shardings and compiled functions of the run.
        directory: run directory, in which the attempt is recorded.
        artifacts: artifacts of the run, to which the program is added.
        watchdog: watchdog, which is disarmed during compilation.
        progress: progress display at the terminal.
    """

    def __init__(
        self,
        config: TrainerConfig,
        setup: TrainingSetup,
        directory: RunDirectory,
        artifacts: Artifacts,
        watchdog: Watchdog,
        progress: Progress,
    ):
        self._config, self._program, self._directory, self._artifacts = config, setup, directory, artifacts
        self._watchdog, self._progress = watchdog, progress
        self._recorded = False

    def ensure_compiled(self, state: TrainState, batch: Batch, watcher: Watcher) -> bool:
        """Compiles the programs of the next step and of its observers, for rows with the shape of those in `batch`.

        Returns:
            True if something was compiled; False if everything was already compiled.
        """
        step = state.step
        if self._program.step.is_compiled(step):
            return False
        # Compilation may take many minutes without being stuck, so it is not timed.
        self._watchdog.disarm()
        self._progress.phase("compiling the training step")
        started = time.monotonic()
        observed = watcher.due_between(step, self._config.num_train_steps)
        executable = self._program.step.compile(batch, step, observed=observed)
        if observed:
            watcher.compile(state)
        fingerprint = executable.fingerprint()
        self._progress.note(f"compiled in {time.monotonic() - started:.1f} s, program {fingerprint}")
        if self._config.bitwise:
            for note in check_program_agreement(fingerprint, executable.graph_hash):
                self._progress.note(note)
        if not self._recorded:
            self._record_program(executable, step, fingerprint)
        return True

    def _record_program(self, executable: Executable | Executables, step: int, fingerprint: str) -> None:
        # The attempt is only recorded now, so that an attempt without any step leaves no trace in the records of the
        # run.
        self._recorded = True
        if self._config.log_jaxprs:
            self._artifacts.write("train_step.jaxpr.txt", executable.jaxpr(), type="program")
        if self._config.log_xla_hlo:
            self._artifacts.write("train_step.hlo.txt", executable.hlo(), type="program")
        rows = self._program.step.plans.at(step).rows
        program = {PROGRAM: fingerprint, GRAPH: executable.graph_hash()}
        for note in self._directory.record_attempt(self._config, step=step, rows=rows, program=program):
            self._progress.note(note)
        for name, kind in (("config.yaml", "config"), ("env.json", "environment")):
            self._artifacts.log(name, self._directory.path / name, type=kind)
