"""Hooks: functions of the user that are called between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from lm_trainer.step.state.train_state import TrainState


@dataclass(frozen=True)
class StepInfo:
    """A step that has been started; its numbers may still be on their way."""

    state: TrainState
    """After the step; the next step consumes its arrays, so a hook that wants to keep them copies them."""
    metrics: Mapping[str, jax.Array]
    """float32 scalars on the device: `loss`, `grad_norm`, `tokens`, and what the loss and the optimizer report."""
    learning_rate: float | None
    """None where the optimizer keeps its own."""
    tokens: int
    """Positions in the global batch."""
    total_tokens: int
    """Positions in all batches so far, this one included."""
    loading: float
    """Seconds that the step waited for data."""

    @property
    def step(self) -> int:
        """Steps done, this one included."""
        return self.state.step

    @property
    def loss(self) -> float:
        """In nats per token; waits until the step is done."""
        return scalar(self.metrics["loss"])


def scalar(x: jax.Array) -> float:
    """The value of a scalar that every device has; waits until it is computed."""
    # Of this process's own copy: an array over several processes cannot be read as a whole.
    return float(np.asarray(x.addressable_data(0)))


HookFn = Callable[[StepInfo], Any]

When = int | Sequence[int]
"""A number of steps between two calls, or the steps after which to call."""


def is_due(every: When, step: int) -> bool:
    """True if `step`, steps done, is a multiple of `every` or in its list."""
    return step % every == 0 if isinstance(every, int) else step in every


class _Hook(NamedTuple):
    function: HookFn
    every: When


class Hooks:
    """Functions in the order in which they were added."""

    def __init__(self) -> None:
        self._hooks: list[_Hook] = []

    def add(self, function: HookFn, every: When) -> None:
        """Calls `function` after each step whose number `every` divides, or that it lists.

        Raises:
            ValueError: when `every` is no positive number, nor a list of such.
        """
        steps = [every] if isinstance(every, int) else every
        if isinstance(steps, str) or not all(isinstance(step, int) and step > 0 for step in steps):
            raise ValueError(f"every: expected a positive number of steps, or a list of steps, got {every!r}")
        self._hooks.append(_Hook(function, every))

    def run(self, info: StepInfo, *, force: bool = False) -> None:
        """Calls those that are due, or with `force` all of them."""
        for hook in self._hooks:
            if force or is_due(hook.every, info.step):
                hook.function(info)
