"""Hooks: user functions that are called between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from lm_trainer.step.state.train_state import TrainState


@dataclass(frozen=True)
class StepInfo:
    """A dispatched step, whose results may not have been computed yet."""

    state: TrainState
    """State after the step. The next step donates its arrays, so a hook must copy the arrays that it wants to keep."""
    metrics: Mapping[str, jax.Array]
    """float32 scalars on the device: `loss`, `grad_norm`, `tokens`, and metrics of the loss and the optimizer."""
    learning_rate: float | None
    """Learning rate of the step; None if the optimizer has an internal schedule."""
    tokens: int
    """Number of positions in the global batch."""
    total_tokens: int
    """Number of positions in all batches so far, including this one."""
    loading: float
    """Time in seconds that the step waited for data."""

    @property
    def step(self) -> int:
        """Number of completed steps, including this one."""
        return self.state.step

    @property
    def loss(self) -> float:
        """Loss in nats per token. Blocks until the step has been computed."""
        return read_scalar(self.metrics["loss"])


def read_scalar(x: jax.Array) -> float:
    """Returns the value of a replicated scalar. Blocks until it has been computed."""
    # Reads the copy of this process, because an array that spans several processes cannot be read directly.
    return float(np.asarray(x.addressable_data(0)))


HookFn = Callable[[StepInfo], Any]

When = int | Sequence[int]
"""Number of steps between two calls, or a list of the steps after which a function is called."""


def is_due(every: When, step: int) -> bool:
    """Returns True if `step`, the number of completed steps, is a multiple of `every` or in the list."""
    return step % every == 0 if isinstance(every, int) else step in every


class _Hook(NamedTuple):
    function: HookFn
    every: When


class Hooks:
    """List of hooks in the order in which they were added."""

    def __init__(self) -> None:
        self._hooks: list[_Hook] = []

    def add(self, function: HookFn, every: When) -> None:
        """Registers `function` to be called after every `every`-th step, or after the listed steps.

        Raises:
            ValueError: if `every` is neither a positive number nor a list of positive numbers.
        """
        steps = [every] if isinstance(every, int) else every
        if isinstance(steps, str) or not all(isinstance(step, int) and step > 0 for step in steps):
            raise ValueError(f"every: expected a positive number of steps, or a list of steps, got {every!r}")
        self._hooks.append(_Hook(function, every))

    def run(self, info: StepInfo, *, force: bool = False) -> None:
        """Calls the hooks that are due, or all of them if `force` is True."""
        for hook in self._hooks:
            if force or is_due(hook.every, info.step):
                hook.function(info)
