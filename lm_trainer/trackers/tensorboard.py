"""Tracker that writes event files for TensorBoard."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from lm_trainer.core.config import PathType
from lm_trainer.core.errors import UserError
from lm_trainer.core.files import expand_home
from lm_trainer.trackers.base import TrackedRun, TrackerConfig
from lm_trainer.trackers.catch_up import Missing, find_missing_lines, log_records
from lm_trainer.trackers.event_files import LastStep
from lm_trainer.trackers.series import Series

# Files in a bucket are flushed rarely, because each flush writes an object.
_REMOTE_FLUSH_SECONDS = 60.0


class TensorboardConfig(TrackerConfig):
    """Writes event files for `tensorboard --logdir`. The viewer is a separate package."""

    type: Literal["tensorboard"] = "tensorboard"
    logdir: Annotated[str, PathType(schemes=("gs", "s3"))] | None = None
    """Event files are written to `logdir`/run id, which may be a gs:// or s3:// URL. The default is `tensorboard` in
    the run directory."""

    def open(self, run: TrackedRun) -> TensorboardTracker:
        return TensorboardTracker(self.directory(run), resume_step=run.resume_step)

    def directory(self, run: TrackedRun) -> str:
        """Returns the directory for the event files of a run."""
        return (
            str(run.dir / "tensorboard") if self.logdir is None else f"{expand_home(self.logdir).rstrip('/')}/{run.id}"
        )


@contextmanager
def _without_torch() -> Iterator[None]:
    """Hides torch from packages that would import it if it is installed.

    They do not need it, and importing it takes seconds.
    """
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        if hidden:
            del sys.modules["torch"]


class TensorboardTracker:
    """Writes event files. Each event is written when it is logged.

    `tensorboardX.SummaryWriter` is not used, because it writes in a thread: if the thread dies because of a full disk,
    the next call waits forever.
    """

    def __init__(self, directory: str, *, resume_step: int):
        with _without_torch():
            from tensorboardX import event_file_writer, record_writer, summary
            from tensorboardX.proto import event_pb2, summary_pb2

        self._text_summary, self._hparams = summary.text, summary.hparams
        # Type checkers do not see the names of generated protobuf classes.
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        remote = "://" in directory
        try:
            record_writer.directory_check(directory)
            # Reads the files of earlier attempts before this attempt adds a file.
            start = self._events.SessionLog.START
            self._shown = None if remote else LastStep(Path(directory), self._events.Event, start)
            # tensorboardX names files by the time in seconds, which may not be unique among attempts.
            suffix = f".{time.time_ns() % 10**9:09}.{os.getpid()}"
            self._file = event_file_writer.EventsWriter(f"{directory}/events", suffix)
        except (OSError, ImportError) as error:
            raise UserError(f"{directory}: cannot hold event files ({error}); set trainer.tracker.logdir") from error
        self._local = None if remote else next(Path(directory).glob(f"*{suffix}"))
        self._flush_seconds = _REMOTE_FLUSH_SECONDS if remote else 0.0
        self._flushed = time.monotonic()
        # Makes TensorBoard drop the events in earlier files from this step on, because they are logged a second time.
        first = resume_step + 1 if resume_step else 0
        self._write(first, session_log=self._events.SessionLog(status=self._events.SessionLog.START))

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        summary = self._summaries.Summary
        values = [summary.Value(tag=name, simple_value=number) for name, number in metrics.items()]
        self._write(step, summary=summary(value=values))

    def log_record(self, record: Mapping[str, str], *, step: int) -> None:
        """Does nothing, because TensorBoard only shows numbers over steps."""

    def log_config(self, config: Mapping[str, Any]) -> None:
        self.log_text("config", _as_markdown(config), step=0)
        # The values of the two metrics are placeholders. They declare metrics by which TensorBoard can sort runs.
        for summary in self._hparams(dict(_flatten_config(config, "")), {"train/loss": 0.0, "eval/loss": 0.0}):
            self._write(0, summary=summary)

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        self.log_text("summary", _as_markdown(summary), step=0)

    def log_text(self, name: str, text: str, *, step: int) -> None:
        self._write(step, summary=self._text_summary(name, text))

    def log_histogram(self, name: str, counts: np.ndarray, edges: np.ndarray, *, step: int) -> None:
        # Bucket limits must increase strictly, so bins between equal edges are merged.
        keep = np.append(edges[2:] > edges[1:-1], True)
        middles = (edges[:-1] + edges[1:]) / 2
        # The sum and the sum of squares use the middles of the bins, because the values themselves are unknown.
        histogram = self._summaries.HistogramProto(
            min=edges[0],
            max=edges[-1],
            num=counts.sum(),
            sum=(counts * middles).sum(),
            sum_squares=(counts * middles**2).sum(),
            bucket_limit=edges[1:][keep].tolist(),
            bucket=np.add.reduceat(counts, np.append(0, np.flatnonzero(keep)[:-1] + 1)).tolist(),
        )
        self._write(
            step, summary=self._summaries.Summary(value=[self._summaries.Summary.Value(tag=name, histo=histogram)])
        )

    def log_alert(self, kind: str, message: str, *, step: int) -> None:
        self.log_text(f"alerts/{kind}", message, step=step)

    def log_artifact(self, name: str, path: Path, *, type: str) -> None:
        """Does nothing, because TensorBoard does not show files, and the run directory contains them."""

    def missing_lines(self, lines: Mapping[str, Series]) -> Missing:
        # Files in a bucket would have to be downloaded completely.
        if self._shown is None:
            return {}
        recorded = {
            name: [step for step in series.steps(name) if self._shown.has_line(name, step)]
            for series in lines.values()
            for name in series.names
        }
        return find_missing_lines(lines, recorded)

    def insert_missing(self, records: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        log_records(self, records)

    def sync(self) -> None:
        self._file.flush()
        self._flushed = time.monotonic()
        if self._local is not None:
            # Opens the file by its name, to detect that it was removed.
            with self._local.open("rb") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        self._file.close()

    def _write(self, step: int, **content: Any) -> None:
        self._file.write_event(self._events.Event(wall_time=time.time(), step=step, **content))
        timestamp = time.monotonic()
        if timestamp - self._flushed >= self._flush_seconds:
            self._file.flush()
            self._flushed = timestamp


def _as_markdown(values: Mapping[str, Any]) -> str:
    return "```json\n" + json.dumps(values, indent=1) + "\n```"


def _flatten_config(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a configuration by dotted key, for comparing runs in TensorBoard."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flatten_config(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        yield key, json.dumps(value)
    else:
        yield key, value
