"""Settings and last metrics of runs that may differ in a few settings only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.metrics import read_metrics_by_step
from lm_trainer.run.config.run_config import changed_keys
from lm_trainer.run.files.find_run import find_run
from lm_trainer.run.files.records import read_run_record, recorded_identity


@dataclass(frozen=True)
class RunValues:
    """Settings and results of a run."""

    name: str
    settings: Mapping[str, Any]
    """Sections of the configuration that decide the run's numbers."""
    metrics: Mapping[str, Any]
    """The last value of each metric."""
    step: int
    """The last step."""

    def positive(self, metric: str) -> float:
        """Returns the last value of a metric.

        Raises:
            UserError: if it is not a positive number.
        """
        value = self.metrics.get(metric)
        if not isinstance(value, int | float) or not np.isfinite(value) or value <= 0:
            losses = ", ".join(sorted(key for key in self.metrics if key.startswith("eval/"))) or "none"
            raise UserError(f"{self.name} has no positive number {metric}; choose others with --metric (has {losses})")
        return float(value)


def read_run_values(names: Sequence[str], law: str, varied: Sequence[str]) -> list[RunValues]:
    """Reads runs, given by IDs or directories.

    Args:
        names: run IDs or run directories.
        law: what is fitted to them, for messages.
        varied: settings in which they may differ, with all settings below.

    Raises:
        UserError: if a run does not exist, or differs from the first run in another setting.
    """
    runs = []
    for name in names:
        directory = find_run(name)
        by_step = read_metrics_by_step(directory / "metrics.jsonl")
        metrics = {key: value for _, row in sorted(by_step.items()) for key, value in row.items()}
        settings = recorded_identity(read_run_record(directory), directory)
        runs.append(RunValues(name, settings, metrics, max(by_step, default=0)))
    for run in runs[1:]:
        _check_same(runs[0], run, law, varied)
    return runs


def _check_same(first: RunValues, other: RunValues, law: str, varied: Sequence[str]) -> None:
    differences = changed_keys(first.settings, other.settings)
    unexpected = [key for key in differences if not any(key == name or key.startswith(f"{name}.") for name in varied)]
    if unexpected:
        raise UserError(
            f"{other.name} and {first.name} differ in {', '.join(unexpected[:4])}; {law} is of runs that differ in "
            f"{', '.join(varied[:-1])} and {varied[-1]} alone"
        )
