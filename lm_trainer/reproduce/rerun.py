"""A run computed again from one of its checkpoints, in a scratch directory, as a resume would."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from lm_trainer.checkpoint.digest import digests, hashes
from lm_trainer.checkpoint.policy import CheckpointerConfig
from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.core.runtime import configure_jax
from lm_trainer.health.watchdog import WatchdogConfig
from lm_trainer.parallel.distributed import DistributedConfig
from lm_trainer.reproduce.record import RunRecord
from lm_trainer.run.checkpoints import saved_arrays
from lm_trainer.run.config import RunConfig
from lm_trainer.run.environment import threads_again
from lm_trainer.run.fingerprint import fingerprint, link
from lm_trainer.run.hooks import scalar
from lm_trainer.run.metrics import step_metrics
from lm_trainer.run.train import PreparedRun, prepare
from lm_trainer.run.trainer_config import TrainerConfig
from lm_trainer.step.elastic import Observer
from lm_trainer.step.norms import WatchConfig
from lm_trainer.trackers import Progress


class Rerun:
    """One step after another; what they compute is what the run computed, if all is well.

    Attributes:
        state: after the last step.
        batch: of the last step: this process's rows.
        program: the hash of the compiled program; None before the first step.
    """

    def __init__(self, run: PreparedRun, start: int, chain: str | None):
        self.run, self._chain = run, chain
        self.state = run.state
        self.batch: Batch | None = None
        self.program: str | None = None
        if self.state.step != start:
            raise UserError(
                f"the checkpoint of step {start} cannot be used: it is damaged, or the run has replaced it meanwhile"
            )
        # There is nothing to save, so that a signal need not wait for the end of a step.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._batches = run.batches()

    def next_batch(self) -> Batch:
        """The batch of the step that comes next, as long as it has not been done."""
        if self.batch is None:
            self.batch = next(self._batches, None)
        if self.batch is None:
            raise UserError(f"the data end after step {self.state.step}")
        return self.batch

    def step(self, observer: Observer | None = None) -> dict[str, float]:
        """Does one step, and returns what a run records of it."""
        batch, at, program = self.next_batch(), self.state.step, self.run.program
        if not program.step.compiled(at):
            self.run.attempt.progress.phase("compiling the training step")
            self.program = program.step.compile(batch, at).fingerprint()
        self.state, metrics = program.take_step(self.state, batch, observer)
        self.batch = None
        values = {name: scalar(x) for name, x in metrics.items()}
        if self._chain is not None:
            self._chain = link(self._chain, self.state.step, values["loss"], values["grad_norm"])
        return step_metrics(values, program.schedule(at))

    def hashes(self) -> dict[str, str]:
        """Of each parameter."""
        return hashes(self.state.params)

    def fingerprint(self) -> str | None:
        """What the run should have recorded at this step; None when the chain up to the checkpoint is not known."""
        return None if self._chain is None else fingerprint(self._chain, self.hashes())

    def digests(self) -> dict[str, int]:
        """Of all that a checkpoint of this state holds."""
        return digests(saved_arrays(self.state, self.run.program))


@contextlib.contextmanager
def rerun(record: RunRecord, start: int, *, overrides: Sequence[str] = (), progress: Progress) -> Iterator[Rerun]:
    """Takes a run up again after `start` steps: at a checkpoint, or at its start.

    Nothing is written into the run. The devices are those of this machine; how the state lies on them is free.

    Raises:
        UserError: when the checkpoint or the data are gone, or the devices do not fit.
    """
    with tempfile.TemporaryDirectory(prefix="lmt-") as scratch, contextlib.chdir(record.root):
        config = _scratched(record.config(start + 1, overrides), Path(scratch), record.id)
        configure_again(record, config.trainer, start + 1)  # before a checkpoint is looked at
        saved = record.checkpoint(start)
        if start in record.saved():
            _lay_out(record.checkpoints, start, Path(scratch) / "checkpoints" / record.id)
        changed = any(change["step"] == start for change in record.changes)
        chain = saved.get("chain") if saved else ""
        with prepare(config, name=record.id, progress=progress, allow_config_change=changed) as run:
            yield Rerun(run, start, chain)


def configure_again(record: RunRecord, trainer: TrainerConfig, step: int) -> None:
    """Configures JAX to compute what the attempt at `step` did; call it before anything starts its backends, which
    reading a checkpoint does.
    """
    configure_jax(trainer.jax_config, trainer.jax_compilation_cache_dir, threads_again(trainer, record.attempt(step)))


def _scratched(config: RunConfig, scratch: Path, name: str) -> RunConfig:
    """The configuration with all that writes or reports pointed away from the run."""
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
        "distributed": DistributedConfig(initialize_jax_distributed=False),
        "replica_ici_axis_size": 1,
        "replica_dcn_axis_size": 1,
    }
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=changes), "hf_save_path": None})


def _lay_out(checkpoints: Path, step: int, scratch: Path) -> None:
    """One checkpoint of a run as the only one of the scratch run. Its arrays are not copied, and only read."""
    scratch.mkdir(parents=True)
    for name in ("config.yaml", "tokenizer"):
        source = checkpoints / name
        if source.is_dir():
            shutil.copytree(source, scratch / name)
        elif source.is_file():
            shutil.copyfile(source, scratch / name)
    (scratch / str(step)).symlink_to(checkpoints / str(step), target_is_directory=True)


class QuietProgress(Progress):
    """Phases alone: what a run says of itself does not concern the reader of its proof."""

    def note(self, text: str) -> None:
        del text
