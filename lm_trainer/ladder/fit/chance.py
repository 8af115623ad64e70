"""Accuracy of guessing in well-known tasks, from the number of their choices."""

from __future__ import annotations

_CHOICES = {
    2: ("boolq", "copa", "piqa", "winogrande", "wsc273"),
    3: ("social_iqa",),
    4: ("arc_challenge", "arc_easy", "hellaswag", "mmlu", "openbookqa", "race", "sciq"),
    5: ("commonsense_qa",),
}
"""Tasks of lm-evaluation-harness by their number of choices."""
_CHANCES = {task: 1 / count for count, tasks in _CHOICES.items() for task in tasks}


def chance_of(metric: str | None) -> float:
    """Returns the accuracy of guessing for a metric such as `lm_eval/arc_easy/acc`; 0 for an unknown task."""
    parts = (metric or "").split("/")
    return next((_CHANCES[part] for part in parts if part in _CHANCES), 0.0)
