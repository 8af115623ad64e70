"""The files that every run directory has: metrics.jsonl, summary.json, texts.jsonl and histograms.jsonl."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lm_trainer.core.config import LocalPath
from lm_trainer.core.files import ensure_writable_directory, local_path, write_atomically
from lm_trainer.trackers.base import TrackedRun, TrackerConfig
from lm_trainer.trackers.catch_up import Missing
from lm_trainer.trackers.json_lines import (
    HISTOGRAMS,
    METRICS,
    TEXTS,
    JsonLines,
    decode_non_finite,
    read_record_blocks,
    unwritable_error,
)
from lm_trainer.trackers.series import Plain, Series, describe_gap

SUMMARY = "summary.json"


class JsonlConfig(TrackerConfig):
    """Writes a second copy of the files in the run directory, for example on a shared disk."""

    type: Literal["jsonl"] = "jsonl"
    path: LocalPath
    """Directory; metrics.jsonl and the other files are written to `path`/run id."""

    def open(self, run: TrackedRun) -> JsonlTracker:
        directory = local_path(self.path) / run.id
        ensure_writable_directory(directory, "trainer.tracker.path")
        return JsonlTracker(replace(run, dir=directory, series={}))


class JsonlTracker:
    """Writes files with one JSON object per line. Each line is complete before the next step begins.

    A line of metrics.jsonl is `{"step": 12, "time": 1765432100.123, "train/loss": 2.5, ...}`, with the time in seconds
    since 1970. Reading a number returns the identical float. JSON has no NaN and no infinity, so these values are the
    strings "NaN", "Infinity" and "-Infinity" (`read_metrics` converts them back). Each checkpoint adds a line with the
    string `fingerprint`, and each alert adds a line with the strings `alert` (the kind of alert) and `message`. Instead
    of metrics, texts have the keys `name` and `text`, and histograms have `name`, `counts` and `edges`.

    Raises:
        MachineError: in the constructor and in every method, if a file cannot be written. Earlier lines remain
            complete.
    """

    def __init__(self, run: TrackedRun):
        self._run = run
        self._files: dict[str, JsonLines] = {}
        self._open_lines(METRICS)
        # These files are opened now if they exist or should exist, because opening them drops the steps that are logged
        # a second time. Otherwise they are opened with their first line.
        for name in (TEXTS, HISTOGRAMS):
            if (run.dir / name).exists() or name in run.series:
                self._open_lines(name)
        self._summary: dict[str, Any] = {}

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        if reserved := metrics.keys() & {"step", "time"}:
            raise ValueError(f"a metric cannot be called {sorted(reserved)[0]!r}")
        self._open_lines(METRICS).write(
            _start_record(step) | {name: encode_non_finite(value) for name, value in metrics.items()}
        )

    def log_record(self, record: Mapping[str, str], *, step: int) -> None:
        self._open_lines(METRICS).write(_start_record(step) | dict(record))

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Does nothing, because the run directory contains config.yaml."""

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        self._summary |= summary
        path = self._run.dir / SUMMARY
        try:
            write_atomically(path, json.dumps(encode_non_finite(self._summary), indent=1) + "\n")
        except OSError as error:
            raise unwritable_error(path, error) from error

    def log_text(self, name: str, text: str, *, step: int) -> None:
        self._open_lines(TEXTS).write({**_start_record(step), "name": name, "text": text})

    def log_histogram(self, name: str, counts: np.ndarray, edges: np.ndarray, *, step: int) -> None:
        histogram = {"counts": counts.tolist(), "edges": edges.tolist()}
        self._open_lines(HISTOGRAMS).write({**_start_record(step), "name": name, **histogram})

    def log_alert(self, kind: str, message: str, *, step: int) -> None:
        self._open_lines(METRICS).write({**_start_record(step), "alert": kind, "message": message})

    def log_artifact(self, name: str, path: Path, *, type: str) -> None:
        """Does nothing, because artifacts are files in the run directory."""

    def missing_lines(self, lines: Mapping[str, Series]) -> Missing:
        existing = self.lines
        missing = {file: series.missing_in(Series(existing.get(file))) for file, series in lines.items()}
        return {file: names for file, names in missing.items() if names}

    def insert_missing(self, records: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        for file, file_records in records.items():
            self._open_lines(file).insert(file_records)

    def read_records(self, file: str) -> list[dict[str, Any]]:
        return self._files[file].read_records() if file in self._files else []

    def sync(self) -> None:
        for lines in self._files.values():
            lines.sync()

    @property
    def series(self) -> dict[str, Plain]:
        return {name: lines.series for name, lines in self._files.items()}

    @property
    def lines(self) -> dict[str, Plain]:
        return {name: lines.initial_lines for name, lines in self._files.items()}

    @property
    def gaps(self) -> list[str]:
        run = self._run
        return [
            describe_gap(run.dir / name, run.id, run.resume_step, lines.missing)
            for name, lines in self._files.items()
            if lines.missing
        ]

    def close(self) -> None:
        for lines in self._files.values():
            lines.close()

    def _open_lines(self, name: str) -> JsonLines:
        """Opens the file with this name if necessary, and drops the lines that a resumed run logs a second time."""
        if name not in self._files:
            run = self._run
            self._files[name] = JsonLines(run.dir / name, run.resume_step, run.series.get(name))
        return self._files[name]


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Reads the lines of a run's metrics.jsonl in order, with NaN and infinities as floats.

    The file may be read at any time while the run is in progress. An incomplete last line, for example after a power
    cut, is skipped.
    """
    file = Path(run_dir) / METRICS
    if not file.is_file():
        raise FileNotFoundError(file)
    return [
        {name: decode_non_finite(value) for name, value in record.items()}
        for records in read_record_blocks(file)
        for record in records
    ]


def _start_record(step: int) -> dict[str, Any]:
    return {"step": step, "time": round(time.time(), 3)}


def encode_non_finite(value: Any) -> Any:
    """Converts a value to its representation in these files. Non-finite floats become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: encode_non_finite(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [encode_non_finite(v) for v in value]
    return value
