"""Reads a run from its directory. The run may be in progress, finished, or killed while it was writing a line.

Shape letters: N is the number of points of a metric.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import AnyPath
from lm_trainer.health.alerts.predicted_curve import CurveScore, RegisteredCurve, read_curve, score_curve
from lm_trainer.reproduce.lost_metrics import find_lost_metrics
from lm_trainer.reproduce.verify import VERIFIED
from lm_trainer.run.config.predicted_run import describe_other_run, find_differences
from lm_trainer.run.config.run_config import RunConfig, changed_keys
from lm_trainer.run.files.branch import BranchPoint
from lm_trainer.run.files.find_run import find_checkpoints_of_run, find_run
from lm_trainer.run.files.listing import list_runs
from lm_trainer.run.files.records import RUN, read_attempts, read_run_record
from lm_trainer.run.weights.saved_model import read_config
from lm_trainer.trackers.jsonl import METRICS, SUMMARY, TEXTS
from lm_trainer.trackers.metric_columns import MetricColumns, read_metric_columns
from lm_trainer.trackers.token_page import TokenHistory

_SECTIONS = ("model", "optimizer")
"""Configuration sections with several types. Each of them is compared with the defaults of its type."""


@dataclass(frozen=True)
class Alert:
    """An alert that a run has logged."""

    step: int
    kind: str
    message: str


@dataclass(frozen=True)
class ReportedRun:
    """A run, with everything that the report page shows about it."""

    name: str
    path: Path
    state: str
    step: int
    steps: int | None
    changes: Mapping[str, Any]
    """Configuration values that differ from the defaults, by dotted key."""
    identity: Mapping[str, Any]
    """The part of the configuration that affects the numbers."""
    attempts: Sequence[Mapping[str, Any]]
    """Attempts at the run, each with the keys `step` (number of completed steps at its start), `time`, `devices`,
    `versions`, `git` and `program`."""
    metrics: Mapping[str, tuple[np.ndarray, np.ndarray]]
    """Steps [N] and values [N] of each metric, by name. If a step was logged repeatedly, the last value is used."""
    alerts: Sequence[Alert]
    fingerprints: Sequence[tuple[int, str]]
    verifications: Sequence[Mapping[str, Any]]
    """Results of `lmt verify`, each with the keys `time`, `equal`, `steps` (number of recomputed steps) and
    `difference` (the first one)."""
    facts: Mapping[str, Any]
    """The values of `parameters`, `flops_per_token` and `data`, if the run recorded them."""
    samples: Sequence[tuple[int, str]]
    tokens: TokenHistory | None
    gaps: Sequence[str]
    """Messages about files with lost lines, one per file (none for a run with its checkpoints in a bucket), and about a
    prediction that cannot be read."""
    branch: BranchPoint | None = None
    """Start of the run if it is a branch. Its metrics begin after this step."""
    prediction: RegisteredCurve | None = None
    """Curve that was registered before the run."""

    def score_prediction(self) -> CurveScore | None:
        """Returns the prediction compared with the run; None without a prediction."""
        if self.prediction is None:
            return None
        curve = self.prediction.curve
        return score_curve(curve, *self.metrics.get(curve.metric, (np.array([]), np.array([]))))


def read_run(source: str, prediction: AnyPath | None = None) -> ReportedRun:
    """Reads a run, given its ID, its directory, or the URL of its checkpoints.

    Args:
        source: the run.
        prediction: a registered curve of this run; by default the one of `trainer.alerts.off_prediction`.

    Raises:
        UserError: if there is no such run, it has not recorded anything yet, or the prediction is of another run.
    """
    path = find_run(source)
    (listing,) = list_runs([path])
    columns = read_metric_columns(path / METRICS)
    gaps = _describe_gaps(path, listing.id, columns)
    if not columns.last_step:
        raise UserError(gaps[0] if gaps else f"{source}: this run has not done a step yet")
    content, event_lines = read_run_record(path), columns.other_lines
    config = read_config(path)
    registered, problems = _read_prediction(config, prediction)
    return ReportedRun(
        listing.id,
        path,
        listing.state,
        columns.last_step,
        listing.steps,
        _non_default_keys(config),
        content.get("identity", {}),
        [_summarize_attempt(attempt) for attempt in read_attempts(path)],
        columns.curves,
        [Alert(line["step"], line["alert"], line.get("message", "")) for line in event_lines if "alert" in line],
        [(line["step"], line["fingerprint"]) for line in event_lines if "fingerprint" in line],
        [_summarize_verification(entry) for entry in _read_json_lines(path / VERIFIED)],
        _read_json(path / SUMMARY, {}),
        _read_samples(path / TEXTS),
        _read_token_history(path),
        [*gaps, *problems],
        BranchPoint.from_record(content, path / RUN),
        registered,
    )


def _read_prediction(config: RunConfig, file: AnyPath | None) -> tuple[RegisteredCurve | None, list[str]]:
    """Returns the curve that was registered for a run, and messages about a file that is gone."""
    alert = config.trainer.alerts.off_prediction
    if file is not None:
        registered = read_curve(file)
        if differences := find_differences(registered, config):
            raise UserError(f"--prediction: {describe_other_run(str(file), differences)}")
        return registered, []
    if alert is None:
        return None, []
    try:
        return read_curve(alert.file), []
    except UserError as error:
        return None, [f"its prediction is not shown: {error}; name the file with --prediction"]


def with_unique_names(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """Returns the runs, named by their paths if several of them have the same name."""
    names = [run.name for run in runs]
    return [replace(run, name=str(run.path)) if names.count(run.name) > 1 else run for run in runs]


def _non_default_keys(config: RunConfig) -> dict[str, Any]:
    """Returns the values that differ from the defaults, and the type of sections with several types, by dotted key."""
    dumped = config.model_dump(mode="json")
    plain = RunConfig().model_dump(mode="json")
    for name in _SECTIONS:
        section = getattr(config, name)
        # Not validated, because some types have keys without a default.
        plain[name] = type(section).model_construct().model_dump(mode="json", warnings=False)
        plain[name].pop("type", None)
    return {key: new for key, (_, new) in changed_keys(plain, dumped).items() if key != "trainer.tracker"}


def _summarize_attempt(entry: Mapping[str, Any]) -> dict[str, Any]:
    packages = entry.get("packages", {})
    devices = entry.get("devices", [])
    kinds = {kind: devices.count(kind) for kind in dict.fromkeys(devices)}
    names = ("jax", "jaxlib", "flax", "lm_trainer")
    return {
        "step": entry.get("step", 0),
        "time": str(entry.get("time", "")),
        "devices": ", ".join(f"{count} x {kind}" for kind, count in kinds.items()),
        "versions": ", ".join(f"{name} {packages[name]}" for name in names if name in packages),
        "git": entry.get("git") or "",
        "program": entry.get("program") or "",
    }


def _summarize_verification(entry: Mapping[str, Any]) -> dict[str, Any]:
    segments = entry["segments"]
    difference = next((segment["difference"] for segment in segments if segment["difference"]), None)
    return {
        "time": entry["time"],
        "equal": entry["equal"],
        "steps": sum(segment["steps"] for segment in segments),
        "difference": None if difference is None else f"step {difference['step']}, {difference['what']}",
    }


def _describe_gaps(path: Path, run_id: str, columns: MetricColumns) -> list[str]:
    checkpoints = find_checkpoints_of_run(path)
    if not isinstance(checkpoints, Path):
        return []
    lost = find_lost_metrics(path, checkpoints, {METRICS: columns.series})
    return lost.describe_by_file(path, run_id) if lost else []


def _read_samples(file: Path) -> list[tuple[int, str]]:
    return [(record["step"], record["text"]) for record in _read_json_lines(file)]


def _read_json_lines(file: Path) -> list[Any]:
    """Reads the records in a file, and skips incomplete lines."""
    records = []
    for line in file.read_bytes().split(b"\n") if file.is_file() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        records += [record] if isinstance(record, dict) else []
    return records


def _read_token_history(path: Path) -> TokenHistory | None:
    try:
        history = TokenHistory.read(path)
    except UserError:
        return None
    return history if history.steps else None


def _read_json(file: Path, default: Any) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return default


def format_utc_now() -> str:
    """Returns the current time in UTC, as text."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
