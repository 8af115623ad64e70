"""Trackers, which take the metrics of a run: a file for each kind, their union, and the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from lm_trainer.core.errors import UserError
from lm_trainer.trackers.base import Composite, TrackedRun, Tracker, TrackerConfig, report
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
    """Opens metrics.jsonl and the configured trackers, as one that the caller has to close.

    Args:
        configs: the trackers besides metrics.jsonl.
        run_dir: the run directory, which must exist.
        run_id: the name of the run.
        resume_step: how many steps are done and restored; records of later steps are dropped, because they come
            again. 0: the files that are there get another name.
        series: the lines that the run's own files must have, as `Composite.sync` returned them for the checkpoint.
        process_index: of several processes that train one run, only the first, 0, writes anything.

    Raises:
        MachineError: when metrics.jsonl cannot be written.
        UserError: when a tracker needs something from the user, such as a package. One that fails for another
            reason, such as a service that does not answer, is reported and left out.
    """
    if process_index:
        return Composite(NoopTracker(), ())
    run = TrackedRun(Path(run_dir), run_id, resume_step, series or {})
    always, others = JsonlTracker(run), []
    try:
        for config in configs:
            try:
                others.append((config.type, config.open(run)))
            except UserError:
                raise
            # A service that does not answer must not keep a model from being trained.
            except Exception as error:
                report(config.type, error)
    except BaseException:
        Composite(always, others).close()
        raise
    trackers = Composite(always, others)
    if resume_step:
        trackers.catch_up()
    return trackers


def profile_directory(configs: Sequence[AnyTracker], *, run_dir: str | Path, run_id: str) -> Path:
    """The directory for traces of the profiler, chosen so that TensorBoard shows them beside the metrics.

    It is that of the first tensorboard tracker with a local one, else `tensorboard` in the run directory.
    """
    # The profiler of JAX writes local files alone.
    run = TrackedRun(Path(run_dir), run_id, 0)
    boards = (config.directory(run) for config in configs if isinstance(config, TensorboardConfig))
    return Path(next((directory for directory in boards if "://" not in directory), run.dir / "tensorboard"))
