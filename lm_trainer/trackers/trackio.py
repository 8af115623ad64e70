"""Tracker for Trackio, a dashboard on the user's own machine or in a Hugging Face Space."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import model_validator

from lm_trainer.core.errors import UserError
from lm_trainer.trackers.base import TrackedRun, TrackerConfig, require_package
from lm_trainer.trackers.catch_up import Missing, find_missing_lines, log_records
from lm_trainer.trackers.series import Series

_REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
"""Environment variables that make Trackio log to another machine."""


class TrackioConfig(TrackerConfig):
    """Logs to Trackio. Install it with `pip install "lm_trainer[trackio]"`. `trackio show` opens the dashboard."""

    type: Literal["trackio"] = "trackio"
    project: str = "lm_trainer"
    """Name of the project. The dashboard compares the runs of a project."""
    name: str | None = None
    """Name of the run in Trackio. The default is the run ID."""
    group: str | None = None
    """Group of related runs."""
    space_id: str | None = None
    """Hugging Face Space to log to, such as `user/space`, with the token of `hf auth login`. The default is the
    environment variable TRACKIO_SPACE_ID or, if it is not set, the directory TRACKIO_DIR on this machine."""

    @model_validator(mode="after")
    def _is_installed(self) -> TrackioConfig:
        require_package("trackio", "trackio")
        return self

    def open(self, run: TrackedRun) -> TrackioTracker:
        return TrackioTracker(self, run)


class TrackioTracker:
    """One Trackio run, which is continued when the training run resumes.

    Steps that a resumed run computes a second time appear twice, with the same values, because Trackio cannot drop
    records.
    """

    def __init__(self, config: TrackioConfig, run: TrackedRun):
        import trackio

        self._trackio, self._project = trackio, config.project
        self._local = config.space_id is None and not any(map(os.environ.get, _REMOTE))
        with _suppress_prints():
            try:
                # Does not embed the dashboard in a notebook, and does not add the load of the machine to the metrics of
                # a step.
                self._run: Any = trackio.init(
                    config.project,
                    name=config.name or run.id,
                    group=config.group,
                    space_id=config.space_id,
                    resume="allow" if run.resume_step else "never",
                    embed=False,
                    auto_log_cpu=False,
                )
            except ValueError as error:
                raise UserError(f"trainer.tracker: Trackio refused to start: {error}") from error

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_record(self, record: Mapping[str, str], *, step: int) -> None:
        """Does nothing, because Trackio only shows numbers over steps."""

    def log_config(self, config: Mapping[str, Any]) -> None:
        # Trackio sends the configuration with the first metrics.
        self._run.config.update(config)

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        self.log_text("summary", f"```json\n{json.dumps(summary, indent=1)}\n```", step=int(summary.get("step", 0)))

    def log_text(self, name: str, text: str, *, step: int) -> None:
        self._run.log({name: self._trackio.Markdown(text)}, step=step)

    def log_histogram(self, name: str, counts: np.ndarray, edges: np.ndarray, *, step: int) -> None:
        self._run.log({name: self._trackio.Histogram(np_histogram=(counts, edges))}, step=step)

    def log_alert(self, kind: str, message: str, *, step: int) -> None:
        with _suppress_prints():
            self._run.alert(kind, message, step=step)

    def log_artifact(self, name: str, path: Path, *, type: str) -> None:
        with _suppress_prints():
            self._run.log_artifact(str(path), name=f"{name}-{self._run.name}", type=type)

    def missing_lines(self, lines: Mapping[str, Series]) -> Missing:
        # Querying a Space for that many lines at each start would be too slow.
        if not self._local:
            return {}
        from trackio.sqlite_storage import SQLiteStorage

        recorded: dict[str, set[int]] = {}
        for row in SQLiteStorage.get_logs(self._project, self._run.name, run_id=self._run.id):
            for name in row:
                recorded.setdefault(name, set()).add(row["step"])
        return find_missing_lines(lines, recorded)

    def insert_missing(self, records: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        log_records(self, records)

    def sync(self) -> None:
        """Does nothing, because Trackio writes and sends data in its own thread."""

    def close(self) -> None:
        with _suppress_prints():
            self._trackio.finish()  # unlike `self._run.finish`, leaves nothing to do at exit


@contextlib.contextmanager
def _suppress_prints() -> Iterator[None]:
    """Discards the output that Trackio prints, because it would break the progress bar."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
