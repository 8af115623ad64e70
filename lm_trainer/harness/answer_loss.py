"""The loss of correct answers in multiple-choice tasks, which is the input of scaling laws for tasks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

ANSWER_LOSS = "answer_bits_per_byte"


def answer_loss(task: Any, samples: Sequence[Mapping[str, Any]]) -> tuple[float, float | None] | None:
    """Returns the mean over questions of -log2 p(right answer) / UTF-8 bytes of the answer, and its standard error.

    This is the task loss of Bhagia et al. 2024 (https://arxiv.org/abs/2412.04403, section 3.2), which is smooth even if
    accuracy is at chance level. In bits per byte, the space before an answer counts as bits, but not as a byte.

    Args:
        task: a task of the harness.
        samples: the task's questions with the model's answers.

    Returns:
        The mean and the standard error; None for other kinds of tasks, and if a question has several correct answers.
    """
    if getattr(task, "OUTPUT_TYPE", None) != "multiple_choice" or not samples:
        return None
    losses = []
    for sample in samples:
        right = sample["target"]
        if isinstance(right, str):
            choices = task.doc_to_choice(sample["doc"])
            right = choices.index(right) if right in choices else None
        if not isinstance(right, int) or not 0 <= right < len(sample["arguments"]):
            return None
        answer = sample["arguments"][right][1].strip()
        log_probability = float(sample["filtered_resps"][right][0])
        losses.append(-log_probability / math.log(2) / max(len(answer.encode()), 1))
    error = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else None
    return statistics.fmean(losses), error
