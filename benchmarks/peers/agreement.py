"""Checks that all kinds train identically, with equal losses in the first steps and equal weights after them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

STEPS = 4
"""Number of steps that are compared, each on another batch."""


class Trace(NamedTuple):
    """The first steps of one kind."""

    losses: Sequence[float]
    norm: float
    """Norm of all weights after these steps."""


class Tolerance(NamedTuple):
    loss: float
    """Maximum relative difference of a loss."""
    norm: float
    """Maximum relative difference of the weights' norm. It shows a missing weight decay, which losses hardly do."""


# Rounding makes losses diverge. In the fourth step at 124M, PyTorch's 11.3138 differs from the float64 result by
# 2.2e-4, and `lmt`'s loss differs by 1e-6. Tests compare small shapes more closely.
FLOAT32, BFLOAT16 = Tolerance(3.5e-5, 2e-6), Tolerance(2.6e-3, 1e-4)


def find_disagreements(traces: Mapping[str, Trace], reference: str, tolerance: Tolerance) -> list[str]:
    """Describes all differences from `reference` above `tolerance`. Returns an empty list if all kinds agree."""
    expected, messages = traces[reference], []
    for name, trace in traces.items():
        if len(trace.losses) != len(expected.losses):
            messages.append(f"{name} did {len(trace.losses)} steps, {reference} {len(expected.losses)}")
            continue
        for step, (loss, other) in enumerate(zip(trace.losses, expected.losses, strict=True), start=1):
            # A NaN exceeds any tolerance.
            if not math.isclose(loss, other, rel_tol=tolerance.loss):
                messages.append(f"{name}: the loss of step {step} is {loss:.6f}, that of {reference} {other:.6f}")
                break
        if not math.isclose(trace.norm, expected.norm, rel_tol=tolerance.norm):
            messages.append(
                f"{name}: the norm of the weights after {len(trace.losses)} steps is {trace.norm:.6f}, that of "
                f"{reference} {expected.norm:.6f}"
            )
    return messages


def largest_loss_difference(traces: Mapping[str, Trace], reference: str) -> float:
    """Returns the largest difference between a loss and the loss of `reference`, in nats."""
    expected = traces[reference].losses
    return max(abs(a - b) for trace in traces.values() for a, b in zip(trace.losses, expected, strict=True))
