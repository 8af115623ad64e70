"""Tracker for Weights & Biases."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import model_validator

from lm_trainer.core.errors import UserError
from lm_trainer.trackers.base import TrackedRun, TrackerConfig, require_package
from lm_trainer.trackers.catch_up import Missing, find_missing_lines, log_records
from lm_trainer.trackers.series import Series
from lm_trainer.trackers.wandb_log import read_logged_steps

STEP = "global_step"
"""Name of the x axis of all metrics. W&B's own step cannot decrease, so W&B would drop steps that a resumed run
repeats."""
_MAX_SOURCE_BYTES = 1 << 20


class WandbConfig(TrackerConfig):
    """Logs to Weights & Biases.

    Install it with `pip install "lm_trainer[wandb]"`, then run `wandb login` or set WANDB_API_KEY.
    """

    type: Literal["wandb"] = "wandb"
    project: str | None = None
    """Name of the project. The default is the environment variable WANDB_PROJECT, otherwise W&B's own default."""
    entity: str | None = None
    """User or team. The default is the environment variable WANDB_ENTITY, otherwise the default entity of your
    account."""
    tags: tuple[str, ...] = ()
    """Labels of the run."""
    group: str | None = None
    """Group of related runs."""
    id: str | None = None
    """ID in W&B. The default is the run ID, so that a resumed run continues the same W&B run."""
    name: str | None = None
    """Display name in W&B. The default is the ID."""
    resume: Literal["allow", "must", "never", "auto"] = "allow"
    """Reaction to an ID that W&B already knows: `allow` continues the W&B run, `never` raises an error, and `auto`
    continues it only after a crash on the same machine. `must` continues it too, and raises an error for an unknown
    ID."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """`offline` writes to the run directory, for a later `wandb sync`. The default is the environment variable
    WANDB_MODE, otherwise `online`."""
    save_code: bool = True
    """Upload the files that git tracks in the repository of the main script or, if git does not track the script, of
    lm_trainer. Hidden files such as `.env` and files over 1 MB are not uploaded."""
    save_xla_dumps: bool = False
    """Upload the dumps of XLA at the end of the run. Requires `--xla_dump_to=DIRECTORY` in the environment variable
    XLA_FLAGS."""

    @model_validator(mode="after")
    def _is_installed(self) -> WandbConfig:
        require_package("wandb", "wandb")
        return self

    def open(self, run: TrackedRun) -> WandbTracker:
        return WandbTracker(self, run)


class WandbTracker:
    """One W&B run, which is resumed if W&B already knows its ID."""

    def __init__(self, config: WandbConfig, run: TrackedRun):
        import wandb
        from wandb.errors import UsageError

        self._wandb, self._step, self._directory = wandb, run.resume_step, run.dir
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
                resume=config.resume,
                # By default W&B uploads the main script, a diff of the entire checkout, the command line and the
                # address of the repository, including any secrets in them.
                settings=wandb.Settings(console="off", disable_code=True, disable_git=True, x_disable_meta=True),
            )
        except UsageError as error:
            raise UserError(f"trainer.tracker: W&B refused to start: {error}; or set `mode: offline`") from error
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        self._sources = git_tracked_files() if config.save_code else {}

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._step = step
        self._run.log({STEP: step, **metrics})

    def log_record(self, record: Mapping[str, str], *, step: int) -> None:
        """Does nothing, because W&B only shows numbers over steps."""

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)
        if self._sources:
            self._upload("source", "source", self._sources)

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))

    def log_text(self, name: str, text: str, *, step: int) -> None:
        table = self._wandb.Table(columns=["step", "text"], data=[[step, text]])
        self._run.log({STEP: step, name: table})

    def log_histogram(self, name: str, counts: np.ndarray, edges: np.ndarray, *, step: int) -> None:
        self._run.log({STEP: step, name: self._wandb.Histogram(np_histogram=(counts, edges))})

    def log_alert(self, kind: str, message: str, *, step: int) -> None:
        self._run.alert(title=kind, text=f"step {step}: {message}", level="WARN")

    def log_artifact(self, name: str, path: Path, *, type: str) -> None:
        if type == "html":
            # W&B shows HTML among the charts, whereas a file would have to be downloaded.
            self._run.log({STEP: self._step, name: self._wandb.Html(str(path))})
            return
        files = {path.name: path}
        if path.is_dir():
            files = {str(file.relative_to(path)): file for file in sorted(path.rglob("*")) if file.is_file()}
        self._upload(name, type, files)

    def missing_lines(self, lines: Mapping[str, Series]) -> Missing:
        run = self._run
        if run.disabled:
            return {}
        if run.offline:
            return find_missing_lines(lines, read_logged_steps(self._directory, run.id, STEP))
        # Reading the lines from the server would take one request per thousand lines. However, lines are only lost at
        # the end of an attempt, by a kill or after the tracker was switched off, and the server returns the last step
        # of a resumed run.
        last = run.summary.get(STEP, math.inf) if run.resumed else 0
        recorded = {
            name: [step for step in series.steps(name) if step <= last]
            for series in lines.values()
            for name in series.names
        }
        return find_missing_lines(lines, recorded)

    def insert_missing(self, records: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        log_records(self, records)

    def sync(self) -> None:
        """Does nothing, because W&B writes and sends data in another process."""

    def close(self) -> None:
        if self._dump_dir is not None and self._dump_dir.is_dir():
            self.log_artifact("xla-dumps", self._dump_dir, type="xla_dumps")
        self._run.finish()

    def _upload(self, name: str, type: str, files: Mapping[str, Path]) -> None:
        artifact = self._wandb.Artifact(f"{name}-{self._run.id}", type=type)
        for entry, path in files.items():
            artifact.add_file(str(path), name=entry)
        self._run.log_artifact(artifact)


def git_tracked_files() -> dict[str, Path]:
    """Returns the paths of the files that git tracks in the repository of the main script, by name in the repository.

    Leaves out hidden and large files. If git does not track the main script, as for `lmt`, uses the checkout of
    lm_trainer. Returns an empty dict if there is no checkout.
    """
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    root = (main and _find_repository(Path(main).resolve())) or _find_repository(Path(__file__).resolve())
    if root is None:
        return {}
    # Uses only tracked files, because an untracked file may be a data dump or contain a key.
    listed = _run_git(root, "ls-files", "-z") or ""
    names = [name for name in listed.split("\0") if name and not any(p.startswith(".") for p in name.split("/"))]
    files = {name: root / name for name in names}
    # Skips links, because they may point out of the repository.
    return {
        n: p for n, p in files.items() if p.is_file() and not p.is_symlink() and p.stat().st_size <= _MAX_SOURCE_BYTES
    }


def _find_repository(file: Path) -> Path | None:
    """Returns the root of the checkout in which git tracks `file`, or None if git does not track it."""
    if not _run_git(file.parent, "ls-files", "--error-unmatch", file.name):
        return None
    top = _run_git(file.parent, "rev-parse", "--show-toplevel")
    return Path(top.strip()) if top else None


def _run_git(directory: Path, *command: str) -> str | None:
    """Runs git and returns its output; None if it fails or is not installed."""
    try:
        # A repository on a dead mount must not delay the start of a run.
        done = subprocess.run(
            ["git", "-C", str(directory), *command], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _xla_dump_directory() -> Path:
    match = re.search(r"--xla_dump_to=(\S+)", os.environ.get("XLA_FLAGS", ""))
    if match is None:
        raise UserError(
            "trainer.tracker.save_xla_dumps is set, but XLA dumps nothing; start with "
            "XLA_FLAGS=--xla_dump_to=DIRECTORY in the environment, or unset it"
        )
    return Path(match[1].strip("'\""))
