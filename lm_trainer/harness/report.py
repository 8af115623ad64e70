"""Formats the results of tasks as a table, as JSON and as metrics."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_trainer.core.files import write_atomically

if TYPE_CHECKING:
    from lm_trainer.harness.run import TaskResult

_HEADINGS = ("task", "questions", "examples", "metric", "value")


def task_rows(results: Sequence[TaskResult]) -> list[tuple[str, ...]]:
    """Returns the rows of a table, which are the headings and one row per metric."""
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for result in results:
        counts = ["" if x is None else str(x) for x in (result.num_questions, result.num_fewshot)]
        for metric, value in result.metrics.items():
            error = result.errors.get(metric)
            rows.append((result.name, *counts, metric, f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")))
    return rows


def task_metrics(results: Sequence[TaskResult]) -> dict[str, float]:
    """Returns the results as metrics of a run, named `lm_eval/TASK/METRIC`."""
    return {f"lm_eval/{result.name}/{metric}": value for result in results for metric, value in result.metrics.items()}


def task_json(results: Sequence[TaskResult]) -> list[dict[str, Any]]:
    """Returns the results as plain data, without samples."""
    return [
        {
            "name": result.name,
            "questions": result.num_questions,
            "num_fewshot": result.num_fewshot,
            "metrics": dict(result.metrics),
            "errors": dict(result.errors),
        }
        for result in results
    ]


def write_samples(directory: Path, results: Sequence[TaskResult]) -> None:
    """Writes all questions of each task, with the model's answers, to `TASK.jsonl` in a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for result in results:
        if result.samples:
            lines = [json.dumps(sample, default=str, ensure_ascii=False) + "\n" for sample in result.samples]
            write_atomically(directory / f"{result.name.replace('/', '-')}.jsonl", "".join(lines))
