"""Recomputes a run from one of its checkpoints, by resuming it in a temporary directory."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from lm_trainer.checkpoint.digest import compute_checksums, compute_hashes
from lm_trainer.checkpoint.policy import CheckpointerConfig
from lm_trainer.core.batch import Batch
from lm_trainer.core.bucket import Bucket, StoragePath
from lm_trainer.core.errors import UserError
from lm_trainer.core.runtime import configure_jax
from lm_trainer.health.watchdog import WatchdogConfig
from lm_trainer.parallel.distributed import DistributedConfig
from lm_trainer.reproduce.record import RunRecord
from lm_trainer.reproduce.same_data import check_text_exists
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.files.directory import record_branch
from lm_trainer.run.files.environment import num_cpu_threads_for_rerun
from lm_trainer.run.files.fingerprint import compute_fingerprint, extend_chain
from lm_trainer.run.train import PreparedRun, prepare_run
from lm_trainer.run.training.hooks import read_scalar
from lm_trainer.run.training.metrics import step_metrics
from lm_trainer.run.weights.initial_weights import OtherDataError
from lm_trainer.run.weights.saved_model import copy_model_files
from lm_trainer.run.weights.saved_state import arrays_to_save
from lm_trainer.step.base import Observer
from lm_trainer.step.updates.watch import WatchConfig
from lm_trainer.trackers import Progress


class Rerun:
    """A run that is recomputed step by step.

    Attributes:
        state: training state after the last step.
        batch: rows of this process in the next step; None until `next_batch` has read them.
        program: hash of the text of the compiled program; None before the first step.
        graph: hash of the graph of the compiled program; None before the first step.
    """

    def __init__(self, run: PreparedRun, start: int, chain: str | None):
        self.run, self._chain = run, chain
        self.state = run.state
        self.batch: Batch | None = None
        self.program: str | None = None
        self.graph: str | None = None
        if self.state.step != start:
            raise UserError(
                f"the checkpoint of step {start} cannot be used: it is damaged, or the run has replaced it meanwhile"
            )
        # There are no checkpoints to save, so a signal does not have to wait for the end of a step.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._batches = run.batches()

    @property
    def chain(self) -> str | None:
        """Hash chain over all steps so far; None if the checkpoint has none."""
        return self._chain

    def next_batch(self) -> Batch:
        """Reads the batch of the next step. Repeated calls return the same batch until `run_step` has used it."""
        if self.batch is None:
            self.batch = next(self._batches, None)
        if self.batch is None:
            raise UserError(f"the data end after step {self.state.step}")
        return self.batch

    def compile(self) -> None:
        """Compiles the next step, unless this has been done."""
        batch, step = self.next_batch(), self.run.setup.step
        if not step.is_compiled(self.state.step):
            self.run.attempt.progress.phase("compiling the training step")
            executable = step.compile(batch, self.state.step)
            self.program, self.graph = executable.fingerprint(), executable.graph_hash()

    def run_until(self, completed: int) -> None:
        """Runs steps until `completed` steps are completed."""
        while self.state.step < completed:
            self.run.attempt.progress.phase(f"step {self.state.step + 1}, on the way to {completed + 1}")
            self.run_step()

    def run_step(self, observer: Observer | None = None) -> dict[str, float]:
        """Runs one step, and returns the metrics that a run records for it."""
        batch, step_index, program = self.next_batch(), self.state.step, self.run.setup
        self.compile()
        self.state, metrics = program.take_step(self.state, batch, observer)
        self.batch = None
        values = {name: read_scalar(x) for name, x in metrics.items()}
        if self._chain is not None:
            self._chain = extend_chain(self._chain, self.state.step, values["loss"], values["grad_norm"])
        return step_metrics(values, program.learning_rate(step_index))

    def compute_hashes(self) -> dict[str, str]:
        """Computes the hash of each parameter, by name."""
        return compute_hashes(self.state.params)

    def compute_fingerprint(self) -> str | None:
        """Computes the fingerprint that the run should have at this step; None if the checkpoint has no hash chain."""
        return None if self._chain is None else compute_fingerprint(self._chain, self.compute_hashes())

    def compute_state_hashes(self) -> dict[str, str]:
        """Computes the hash of every array that a checkpoint of this state would contain, by name."""
        return compute_hashes(arrays_to_save(self.state, self.run.setup))

    def compute_checksums(self) -> dict[str, int]:
        """Computes the checksum of every array that a checkpoint of this state would contain, by name."""
        return compute_checksums(arrays_to_save(self.state, self.run.setup))


@contextlib.contextmanager
def open_rerun(
    record: RunRecord,
    start: int,
    *,
    overrides: Sequence[str] = (),
    config: RunConfig | None = None,
    progress: Progress,
) -> Iterator[Rerun]:
    """Resumes a run after `start` steps, from a checkpoint or from its start, without modifying it.

    Uses the devices of this machine. Their number and the sharding may differ from those in the run.

    Args:
        record: the run.
        start: number of completed steps.
        overrides: settings `KEY=VALUE` that override the configuration and do not affect the results.
        config: configuration of the steps, if it is not the recorded one with `overrides`. Must have the same results.
        progress: shows the current phase.

    Raises:
        UserError: if the checkpoint or the data no longer exist, or the configuration does not fit the devices.
    """
    with tempfile.TemporaryDirectory(prefix="lmt-") as scratch, contextlib.chdir(record.root):
        plain = record.load_config(start + 1, overrides) if config is None else config
        config = _isolate_config(plain, Path(scratch), record.id)
        configure_as_recorded(
            record, config.trainer, start + 1
        )  # before a checkpoint is read, which starts the backends
        saved = record.read_checkpoint(start)
        if start in record.checkpoint_steps():
            config = _link_checkpoint(config, record.checkpoints, start, Path(scratch) / "checkpoints" / record.id)
        if record.branch is not None and start == record.branch.step:
            # With it, the first step of a branch may have another optimizer and other data than its checkpoint.
            record_branch(config, record.id, record.branch)
        # If the user changed the configuration at exactly this step, allows the change here too.
        changed = any(change["step"] == start for change in record.changes)
        # Checkpoints of older versions contain no hash chain.
        chain = saved.get("chain") if saved else record.first_chain
        check_text_exists(record.id, config.data)
        with contextlib.ExitStack() as stack:
            try:
                run = stack.enter_context(
                    prepare_run(config, name=record.id, progress=progress, allow_config_change=changed)
                )
            except OtherDataError as error:
                raise UserError(
                    f"the data of {record.id} have changed since it was trained: {error.problem}; put back the text, "
                    "the tokenizer, or their cache"
                ) from None
            yield Rerun(run, start, chain)


@contextlib.contextmanager
def open_first_steps(config: RunConfig, *, progress: Progress) -> Iterator[Rerun]:
    """Starts a new run of a configuration in a temporary directory, which is removed at the end.

    Uses the devices of this machine, and the configuration's cache of tokenised text.

    Raises:
        UserError: if the data or the initial weights cannot be read, or the configuration does not fit the devices.
    """
    with tempfile.TemporaryDirectory(prefix="lmt-") as scratch:
        isolated = _isolate_config(config, Path(scratch), "first-steps")
        with prepare_run(isolated, name="first-steps", progress=progress) as run:
            yield Rerun(run, 0, "")


def configure_as_recorded(record: RunRecord, trainer: TrainerConfig, step: int) -> None:
    """Configures JAX as in the attempt that computed `step`.

    Must be called before JAX initialises its backends. Reading a checkpoint starts them.
    """
    configure_jax(
        trainer.jax_config,
        trainer.jax_compilation_cache_dir,
        num_cpu_threads_for_rerun(trainer, record.attempt_at(step)),
    )


def _isolate_config(config: RunConfig, scratch: Path, name: str) -> RunConfig:
    """Returns the configuration with all outputs disabled or redirected to the temporary directory `scratch`."""
    checkpointer = CheckpointerConfig(
        base_path=str(scratch / "checkpoints"), save_interval=timedelta(days=9999), keep=()
    )
    changes: dict[str, Any] = {
        "id": name,
        "log_dir": str(scratch / "logs"),
        "checkpointer": checkpointer,
        "load_checkpoint": None,
        "tracker": (),
        "watch": WatchConfig(interval=0),
        "watchdog": WatchdogConfig(timeout=None),
        "profiler": False,
        "log_jaxprs": False,
        "log_xla_hlo": False,
        "shutdown_at_exit": False,
        # Uses one process even if the run had several: the results do not depend on the number of devices and
        # processes.
        "distributed": DistributedConfig(initialize_jax_distributed=False),
        "replica_ici_axis_size": 1,
        "replica_dcn_axis_size": 1,
    }
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=changes), "hf_save_path": None})


def _link_checkpoint(config: RunConfig, checkpoints: StoragePath, step: int, scratch: Path) -> RunConfig:
    """Makes the run in the temporary directory resume from a checkpoint, by a symbolic link or by the URL of a bucket.

    The checkpoint is not copied, because it may be large.
    """
    if isinstance(checkpoints, Bucket):
        trainer = config.trainer.model_copy(update={"load_checkpoint_path": str(checkpoints / step)})
        return config.model_copy(update={"trainer": trainer})
    scratch.mkdir(parents=True)
    if (checkpoints / "config.yaml").is_file():
        shutil.copyfile(checkpoints / "config.yaml", scratch / "config.yaml")
    copy_model_files(checkpoints, scratch)
    (scratch / str(step)).symlink_to(checkpoints / str(step), target_is_directory=True)
    return config


class QuietProgress(Progress):
    """Progress display that drops the notes of a run, which are not of interest when it is recomputed."""

    def note(self, text: str) -> None:
        del text
