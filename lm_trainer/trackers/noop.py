"""A tracker without any output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lm_trainer.trackers.base import TrackedRun, TrackerConfig
from lm_trainer.trackers.catch_up import Missing
from lm_trainer.trackers.series import Plain, Series


class NoopConfig(TrackerConfig):
    """Disables tracking, except for metrics.jsonl in the run directory."""

    type: Literal["noop"] = "noop"

    def open(self, run: TrackedRun) -> NoopTracker:
        del run
        return NoopTracker()


class NoopTracker:
    """Tracker without output, used by all processes of a run except the first."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        pass

    def log_record(self, record: Mapping[str, str], *, step: int) -> None:
        pass

    def log_config(self, config: Mapping[str, Any]) -> None:
        pass

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        pass

    def log_text(self, name: str, text: str, *, step: int) -> None:
        pass

    def log_histogram(self, name: str, counts: np.ndarray, edges: np.ndarray, *, step: int) -> None:
        pass

    def log_alert(self, kind: str, message: str, *, step: int) -> None:
        pass

    def log_artifact(self, name: str, path: Path, *, type: str) -> None:
        pass

    def missing_lines(self, lines: Mapping[str, Series]) -> Missing:
        del lines
        return {}

    def insert_missing(self, records: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        pass

    def read_records(self, file: str) -> list[dict[str, Any]]:
        del file
        return []

    def sync(self) -> None:
        pass

    @property
    def series(self) -> Mapping[str, Plain]:
        return {}

    @property
    def lines(self) -> Mapping[str, Plain]:
        return {}

    @property
    def gaps(self) -> Sequence[str]:
        return ()

    def close(self) -> None:
        pass
