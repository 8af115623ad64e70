"""Results of tasks for people, for programs and for metrics."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_trainer.core.files import write_atomically

if TYPE_CHECKING:
    from lm_trainer.harness.run import TaskResult

_HEADINGS = ("task", "questions", "examples", "metric", "value")


def task_rows(found: Sequence[TaskResult]) -> list[tuple[str, ...]]:
    """Rows of a table, with the headings first and a row for each metric."""
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for each in found:
        counts = ["" if x is None else str(x) for x in (each.num_questions, each.num_fewshot)]
        for metric, value in each.metrics.items():
            error = each.errors.get(metric)
            rows.append((each.name, *counts, metric, f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")))
    return rows


def task_metrics(found: Sequence[TaskResult]) -> dict[str, float]:
    """Metrics of a run: `lm_eval/TASK/METRIC`."""
    return {f"lm_eval/{each.name}/{metric}": value for each in found for metric, value in each.metrics.items()}


def task_json(found: Sequence[TaskResult]) -> list[dict[str, Any]]:
    """The results as plain data, without samples."""
    return [
        {
            "name": each.name,
            "questions": each.num_questions,
            "num_fewshot": each.num_fewshot,
            "metrics": dict(each.metrics),
            "errors": dict(each.errors),
        }
        for each in found
    ]


def write_samples(directory: Path, found: Sequence[TaskResult]) -> None:
    """Writes every question with the model's answer to `TASK.jsonl` in a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for each in found:
        if each.samples:
            lines = [json.dumps(sample, default=str, ensure_ascii=False) + "\n" for sample in each.samples]
            write_atomically(directory / f"{each.name.replace('/', '-')}.jsonl", "".join(lines))
