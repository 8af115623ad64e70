"""The table that compares several runs: the keys in which they differ, and their last losses."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_trainer.report.run import ReportedRun

_LOSSES = re.compile(r"eval/(.+/)?(micro_|macro_)?loss|eval_avg/(.+/)?loss")
_SEED = "trainer.seed"
MAX_KEYS = 12
"""Maximum number of keys in the table. Runs of unrelated configurations differ in almost every key."""


@dataclass(frozen=True)
class ComparedRuns:
    """A table with one row per run."""

    keys: tuple[str, ...]
    """Keys that affect results, in which the runs differ."""
    metrics: tuple[str, ...]
    """Names of the losses."""
    rows: tuple[tuple[ReportedRun, tuple[str, ...], tuple[float | None, ...]], ...]
    """Each run, its values of `keys` as YAML, and its last values of `metrics`."""
    best: tuple[int | None, ...]
    """Index of the run with the lowest value of each metric, among the runs that have done the most steps."""

    def text_rows(self) -> list[tuple[str, ...]]:
        """Returns the table as text, with its headings. `*` marks the best run of a loss."""
        heads = ("run", "state", "step", *self.keys, *self.metrics)
        rows = [
            (
                run.name,
                run.state,
                str(run.step),
                *values,
                *("" if x is None else f"{x:.5g}{' *' if self.best[j] == i else ''}" for j, x in enumerate(losses)),
            )
            for i, (run, values, losses) in enumerate(self.rows)
        ]
        return [heads, *rows]

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as JSON values: each run with its values of the keys and its losses, and seeds' means."""
        keys = [key for key in self.keys if key != _SEED]
        return {
            "keys": list(self.keys),
            "runs": [
                {
                    "run": run.name,
                    "state": run.state,
                    "step": run.step,
                    "values": dict(zip(self.keys, values, strict=True)),
                    "losses": dict(zip(self.metrics, losses, strict=True)),
                }
                for run, values, losses in self.rows
            ],
            "best": {
                metric: None if index is None else self.rows[index][0].name
                for metric, index in zip(self.metrics, self.best, strict=True)
            },
            "seeds": [
                {
                    "values": dict(zip(keys, values, strict=True)),
                    "runs": count,
                    "losses": {
                        metric: None if moments is None else {"mean": moments[0], "deviation": moments[1]}
                        for metric, moments in zip(self.metrics, losses, strict=True)
                    },
                }
                for values, count, losses in self.seed_groups()
            ],
        }

    def seed_groups(self) -> list[tuple[tuple[str, ...], int, tuple[tuple[float, float] | None, ...]]]:
        """Returns the settings that were trained with several seeds.

        Each entry has the values of `keys` without the seed, the number of runs, and for each metric the mean and the
        standard deviation over the seeds, or None if a run lacks it.
        """
        if _SEED not in self.keys:
            return []
        seed = self.keys.index(_SEED)
        groups: dict[tuple[str, ...], list[tuple[float | None, ...]]] = {}
        for _, values, losses in self.rows:
            groups.setdefault((*values[:seed], *values[seed + 1 :]), []).append(losses)
        return [
            (values, len(group), tuple(map(_mean_and_deviation, zip(*group, strict=True))))
            for values, group in groups.items()
            if len(group) > 1
        ]


def _mean_and_deviation(values: Sequence[float | None]) -> tuple[float, float] | None:
    numbers = [value for value in values if value is not None]
    return (statistics.mean(numbers), statistics.stdev(numbers)) if len(numbers) == len(values) > 1 else None


def compare_runs_in_table(runs: Sequence[ReportedRun]) -> ComparedRuns:
    """Returns the table of several runs."""
    flat = [_flatten(run.identity) for run in runs]
    # The order of the first run's configuration, then keys that only others have.
    names = [
        name
        for name in dict.fromkeys(key for values in flat for key in values)
        if len({values.get(name, "") for values in flat}) > 1
    ]
    keys = tuple(names[:MAX_KEYS])
    metrics = _loss_names(runs)
    losses = [tuple(_last_value(run, name) for name in metrics) for run in runs]
    furthest = max(run.step for run in runs)
    best = tuple(
        min(
            (i for i, run in enumerate(runs) if run.step == furthest and losses[i][column] is not None),
            key=lambda i, column=column: losses[i][column] or 0.0,
            default=None,
        )
        for column in range(len(metrics))
    )
    rows = tuple(
        (run, tuple(values.get(key, "") for key in keys), row)
        for run, values, row in zip(runs, flat, losses, strict=True)
    )
    return ComparedRuns(keys, metrics, rows, best)


def _loss_names(runs: Sequence[ReportedRun]) -> tuple[str, ...]:
    names = sorted({name for run in runs for name in run.metrics if _LOSSES.fullmatch(name)})
    return (*names, "train/loss") if any("train/loss" in run.metrics for run in runs) else tuple(names)


def _last_value(run: ReportedRun, name: str) -> float | None:
    if name not in run.metrics:
        return None
    value = float(run.metrics[name][1][-1])
    return value if math.isfinite(value) else None


def _flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Returns the dotted keys of a numeric identity, each with its value as text."""
    if not isinstance(value, Mapping):
        return {prefix[:-1]: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}
    return {key: text for name, item in value.items() for key, text in _flatten(item, f"{prefix}{name}.").items()}
