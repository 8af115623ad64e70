"""Trackers for the metrics of a run: one module for each kind, a composite of several trackers, and the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from lm_trainer.core.errors import UserError
from lm_trainer.trackers.base import Composite, TrackedRun, Tracker, TrackerConfig, report_failure
from lm_trainer.trackers.console import Progress
from lm_trainer.trackers.jsonl import JsonlConfig, JsonlTracker, read_metrics
from lm_trainer.trackers.noop import NoopConfig, NoopTracker
from lm_trainer.trackers.series import Plain
from lm_trainer.trackers.tensorboard import TensorboardConfig
from lm_trainer.trackers.trackio import TrackioConfig
from lm_trainer.trackers.wandb import WandbConfig

AnyTracker = Annotated[
    WandbConfig | TensorboardConfig | TrackioConfig | JsonlConfig | NoopConfig,
    Field(discriminator="type"),
]

__all__ = [
    "AnyTracker",
    "Composite",
    "JsonlConfig",
    "JsonlTracker",
    "NoopConfig",
    "Progress",
    "TensorboardConfig",
    "TrackedRun",
    "Tracker",
    "TrackerConfig",
    "TrackioConfig",
    "WandbConfig",
    "open_trackers",
    "profile_directory",
    "read_metrics",
]


def open_trackers(
    configs: Sequence[AnyTracker],
    *,
    run_dir: str | Path,
    run_id: str,
    resume_step: int = 0,
    series: Mapping[str, Plain] | None = None,
    process_index: int = 0,
) -> Composite:
    """Opens metrics.jsonl and the configured trackers as one composite, which the caller must close.

    Args:
        configs: trackers in addition to metrics.jsonl.
        run_dir: the run directory, which must exist.
        run_id: the name of the run.
        resume_step: number of completed steps at which training resumes. Records of later steps are dropped, because
            these steps are logged a second time. With 0, existing files are renamed.
        series: expected lines in the run's files, as returned by `Composite.sync` for the checkpoint.
        process_index: index of this process. Only process 0 writes anything.

    Raises:
        MachineError: if metrics.jsonl cannot be written.
        UserError: if the user has to provide something for a tracker, such as a package. Trackers that fail for another
            reason, such as an unreachable service, are reported and left out.
    """
    if process_index:
        return Composite(NoopTracker(), ())
    run = TrackedRun(Path(run_dir), run_id, resume_step, series or {})
    run_file, opened = JsonlTracker(run), []
    try:
        for config in configs:
            try:
                opened.append((config.type, config.open(run)))
            except UserError:
                raise
            # An unreachable service must not stop training.
            except Exception as error:
                report_failure(config.type, error)
    except BaseException:
        Composite(run_file, opened).close()
        raise
    trackers = Composite(run_file, opened)
    if resume_step:
        trackers.catch_up()
    return trackers


def profile_directory(configs: Sequence[AnyTracker], *, run_dir: str | Path, run_id: str) -> Path:
    """Returns the directory for profiler traces, chosen such that TensorBoard shows them next to the metrics.

    This is the directory of the first tensorboard tracker that writes to a local directory. If there is none, it is
    `tensorboard` in the run directory.
    """
    # JAX's profiler writes only to local files.
    run = TrackedRun(Path(run_dir), run_id, 0)
    boards = (config.directory(run) for config in configs if isinstance(config, TensorboardConfig))
    return Path(next((directory for directory in boards if "://" not in directory), run.dir / "tensorboard"))
