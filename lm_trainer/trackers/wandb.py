"""Weights & Biases."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lm_trainer.core.errors import UserError
from lm_trainer.trackers.base import TrackedRun, TrackerConfig

STEP = "global_step"
"""The x axis of all metrics. W&B's own step cannot go back, so it would drop what a resumed run computes again."""
_MAX_SOURCE_BYTES = 1 << 20


class WandbConfig(TrackerConfig):
    """Logs to Weights & Biases: `pip install "lm_trainer[wandb]"`, then `wandb login` or WANDB_API_KEY."""

    type: Literal["wandb"] = "wandb"
    project: str | None = None
    """Default: WANDB_PROJECT, else W&B's own default."""
    entity: str | None = None
    """User or team. Default: WANDB_ENTITY, else yours."""
    tags: tuple[str, ...] = ()
    """Labels of the run."""
    group: str | None = None
    """Runs that belong together."""
    id: str | None = None
    """Default: the id of the run, so that a resumed run goes on in the same place."""
    name: str | None = None
    """What W&B shows. Default: the id."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """`offline` writes to the run directory, for a later `wandb sync`. Default: WANDB_MODE, else online."""
    save_code: bool = True
    """Upload the files of lm_trainer that git tracks, if it runs from a checkout."""
    save_xla_dumps: bool = False
    """Upload, at the end, what XLA dumped; needs `--xla_dump_to=DIRECTORY` in the environment's XLA_FLAGS."""

    def open(self, run: TrackedRun) -> WandbTracker:
        return WandbTracker(self, run)


class WandbTracker:
    """One W&B run, resumed if W&B knows its id."""

    def __init__(self, config: WandbConfig, run: TrackedRun):
        try:
            import wandb
            from wandb.errors import UsageError
        except ImportError:
            raise UserError(
                "trainer.tracker: the package wandb is not installed; run `pip install lm_trainer[wandb]`, or choose "
                "another tracker, for example `type: tensorboard`"
            ) from None
        self._wandb = wandb
        self._dump_dir = _xla_dump_directory() if config.save_xla_dumps else None
        identity = config.id or run.id
        try:
            self._run = wandb.init(
                project=config.project,
                entity=config.entity,
                id=identity,
                name=config.name or identity,
                group=config.group,
                tags=config.tags or None,
                mode=config.mode,
                dir=str(run.dir),
                resume="allow",
                # W&B would copy the main script and a diff of the whole checkout, whatever they contain.
                settings=wandb.Settings(console="off", disable_code=True),
            )
        except UsageError as error:
            raise UserError(f"trainer.tracker: W&B refused to start: {error}; or set `mode: offline`") from error
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        self._sources = tracked_sources() if config.save_code else {}

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._run.log({STEP: step, **metrics})

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)
        if self._sources:
            self._run.log_artifact(self._source_artifact())

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))

    def log_text(self, name: str, text: str, *, step: int) -> None:
        table = self._wandb.Table(columns=["step", "text"], data=[[step, text]])
        self._run.log({STEP: step, name: table})

    def close(self) -> None:
        if self._dump_dir is not None and self._dump_dir.is_dir():
            artifact = self._wandb.Artifact(f"xla-dumps-{self._run.id}", type="xla_dumps")
            artifact.add_dir(str(self._dump_dir))
            self._run.log_artifact(artifact)
        self._run.finish()

    def _source_artifact(self) -> Any:
        artifact = self._wandb.Artifact(f"source-{self._run.id}", type="source")
        for name, path in self._sources.items():
            artifact.add_file(str(path), name=name)
        return artifact


def tracked_sources() -> dict[str, Path]:
    """Relative name -> path of the files beside the package that git tracks, but hidden and large ones.

    Empty where lm_trainer does not run from a checkout.
    """
    root = Path(__file__).resolve().parents[2]
    try:
        listed = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-z"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    names = [name for name in listed.split("\0") if name and not any(p.startswith(".") for p in name.split("/"))]
    files = {name: root / name for name in names}
    return {
        n: p for n, p in files.items() if p.is_file() and not p.is_symlink() and p.stat().st_size <= _MAX_SOURCE_BYTES
    }


def _xla_dump_directory() -> Path:
    match = re.search(r"--xla_dump_to=(\S+)", os.environ.get("XLA_FLAGS", ""))
    if match is None:
        raise UserError(
            "trainer.tracker.save_xla_dumps is set, but XLA dumps nothing; start with "
            "XLA_FLAGS=--xla_dump_to=DIRECTORY in the environment, or unset it"
        )
    return Path(match[1].strip("'\""))
