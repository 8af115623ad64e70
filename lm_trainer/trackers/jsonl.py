"""The files that every run writes into its directory: metrics.jsonl, summary.json, texts.jsonl, histograms.jsonl."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lm_trainer.core.config import LocalPath
from lm_trainer.core.errors import MachineError
from lm_trainer.core.files import local_path, make_writable, write_atomically
from lm_trainer.trackers.base import TrackedRun, TrackerConfig

logger = logging.getLogger(__name__)

METRICS, TEXTS, HISTOGRAMS, SUMMARY = "metrics.jsonl", "texts.jsonl", "histograms.jsonl", "summary.json"
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlConfig(TrackerConfig):
    """Writes a second copy of the files that the run directory always holds, for example on a shared disk."""

    type: Literal["jsonl"] = "jsonl"
    path: LocalPath
    """The directory; metrics.jsonl and its companions go to `path`/run id."""

    def open(self, run: TrackedRun) -> JsonlTracker:
        directory = local_path(self.path) / run.id
        make_writable(directory, "trainer.tracker.path")
        return JsonlTracker(replace(run, dir=directory))


class JsonlTracker:
    """Writer of one JSON object a line, each complete before the next step begins.

    A line of metrics.jsonl is `{"step": 12, "time": 1765432100.123, "train/loss": 2.5, ...}`, with the time in seconds
    since 1970. A number reads back as the identical float; JSON has no NaN and no infinity, so these are the strings
    "NaN", "Infinity" and "-Infinity" (`read_metrics` turns them back). With a checkpoint comes a line whose
    `fingerprint` is text, with an alert one with the texts `alert` (its kind) and `message`. Texts have `name` and
    `text` instead of metrics, histograms `name`, `counts` and `edges`.

    Raises:
        MachineError: here and in every method, when a file cannot be written. Earlier lines stay whole.
    """

    def __init__(self, run: TrackedRun):
        self._run = run
        self._files = {METRICS: _JsonLines(run.dir / METRICS, run.resume_step)}
        # Opened now if they exist, since opening drops the steps that come again; else with the first line.
        for name in (TEXTS, HISTOGRAMS):
            if (run.dir / name).exists():
                self._lines(name)
        self._summary: dict[str, Any] = {}

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        if reserved := metrics.keys() & {"step", "time"}:
            raise ValueError(f"a metric cannot be called {sorted(reserved)[0]!r}")
        self._lines(METRICS).write(_record(step) | {name: encode(value) for name, value in metrics.items()})

    def log_record(self, record: Mapping[str, str], *, step: int) -> None:
        self._lines(METRICS).write(_record(step) | dict(record))

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Nothing: the run directory has its config.yaml."""

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        self._summary |= summary
        path = self._run.dir / SUMMARY
        try:
            write_atomically(path, json.dumps(encode(self._summary), indent=1) + "\n")
        except OSError as error:
            raise _machine_error(path, error) from error

    def log_text(self, name: str, text: str, *, step: int) -> None:
        self._lines(TEXTS).write({**_record(step), "name": name, "text": text})

    def log_histogram(self, name: str, counts: np.ndarray, edges: np.ndarray, *, step: int) -> None:
        histogram = {"counts": counts.tolist(), "edges": edges.tolist()}
        self._lines(HISTOGRAMS).write({**_record(step), "name": name, **histogram})

    def log_alert(self, kind: str, message: str, *, step: int) -> None:
        self._lines(METRICS).write({**_record(step), "alert": kind, "message": message})

    def log_artifact(self, name: str, path: Path, *, type: str) -> None:
        """Nothing: artifacts are files of the run directory."""

    def close(self) -> None:
        for lines in self._files.values():
            lines.close()

    def _lines(self, name: str) -> _JsonLines:
        """The file of this name, without the lines that a resumed run computes again."""
        if name not in self._files:
            self._files[name] = _JsonLines(self._run.dir / name, self._run.resume_step)
        return self._files[name]


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Reads the lines of a run's metrics.jsonl in order, with NaN and infinities as floats.

    The file of a run that is going on may be read at any time. A torn last line, as a power cut can leave it, is
    skipped.
    """
    records, _ = _parse((Path(run_dir) / METRICS).read_bytes())
    return [{name: _decode(value) for name, value in record.items()} for record, _ in records]


def _record(step: int) -> dict[str, Any]:
    return {"step": step, "time": round(time.time(), 3)}


def encode(value: Any) -> Any:
    """Converts a value to its form in these files: the floats that JSON lacks become texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: encode(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [encode(v) for v in value]
    return value


def _decode(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


class _JsonLines:
    """A file to which whole lines are appended."""

    def __init__(self, path: Path, resume_step: int):
        self._path = path
        try:
            _drop_steps_after(path, resume_step)
            # For appending, so that a line ends up at the end even if somebody else has the file open too.
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _machine_error(path, error) from error
        self._size = os.fstat(self._fd).st_size

    def write(self, record: Mapping[str, Any]) -> None:
        # One unbuffered write a line: a kill between two steps loses nothing, and a kill inside one tears no line.
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        try:
            written = os.write(self._fd, line)
            while written < len(line):
                written += os.write(self._fd, line[written:])
        except OSError as error:
            # A full disk may have taken half a line, which would spoil the next one.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise _machine_error(self._path, error) from error
        self._size += len(line)

    def close(self) -> None:
        if self._fd < 0:
            return
        # Closing twice is harmless: it also happens when another tracker fails to open.
        fd, self._fd = self._fd, -1
        try:
            # At the end alone: it takes milliseconds, and without it a crash of the process loses nothing either.
            os.fsync(fd)
        except OSError as error:
            raise _machine_error(self._path, error) from error
        finally:
            os.close(fd)


def _drop_steps_after(path: Path, step: int) -> None:
    """Keeps the whole lines of steps up to `step`; the file changes by a rename or not at all.

    Where the run begins again at step 0 the file is kept under another name: its checkpoints were lost or moved, and
    nothing says that the steps will come again.
    """
    if not path.exists():
        return
    content = path.read_bytes()
    records, broken = _parse(content)
    if broken:
        logger.warning("%s: dropped %d lines that were not whole", path, broken)
    if records and not step:
        path.rename(aside := _unused_name(path))
        last = max(record["step"] for record, _ in records)
        # Once for all files of a run.
        level = logging.WARNING if path.name == METRICS else logging.INFO
        logger.log(level, "%s reached step %d, but no checkpoint was found: kept as %s", path, last, aside.name)
        return
    kept = [line for record, line in records if record["step"] <= step]
    if len(kept) < len(records):
        logger.info("%s: dropped %d lines of steps after %d, which come again", path, len(records) - len(kept), step)
    text = b"".join(kept)
    if text != content:
        write_atomically(path, text.decode())


def _unused_name(path: Path) -> Path:
    """The first of `metrics-1.jsonl`, `metrics-2.jsonl`, ... that does not exist."""
    names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def _parse(content: bytes) -> tuple[list[tuple[dict[str, Any], bytes]], int]:
    """Parses the records with their lines, and counts the lines that hold none, a torn last one included."""
    records, broken = [], 0
    for line in content.splitlines(keepends=True):
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append((record, line))
        else:
            broken += 1
    return records, broken


def _machine_error(path: Path, error: OSError) -> MachineError:
    return MachineError(
        f"{path}: cannot be written ({error.strerror or error}); make room or mend the directory, then start the same "
        f"command again: the run goes on from its newest checkpoint"
    )
