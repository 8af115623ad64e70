"""Counts what the host does in a step: the programs that it dispatches, and the places where it waits for a device."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax._src.array import ArrayImpl

from lm_trainer.step.dispatch.program import Program

_PACKAGE = "lm_trainer."
_FUNCTIONS = ((jax, "block_until_ready"), (jax, "device_get"), (np, "asarray"), (np, "array"))
_METHODS = ("block_until_ready", "is_ready", "item", "tolist")


class HostWork(NamedTuple):
    """Work of the host since the counting began or `clear` was called."""

    programs: Counter[str]
    """Calls of each program by name: one for each device, or one for all devices of the process."""
    waits: Counter[str]
    """Waits for an array, reads of it, and questions whether it is ready, by the function of the package that does it.

    A read counts even if the array is ready, because readiness depends on the time. Waits of `wait_on_cpu`, which
    returns at once on accelerators, do not count.
    """
    arrays: list[Any]
    """Values that were waited for or read."""

    def clear(self) -> None:
        """Forgets all work so far."""
        for counts in self:
            counts.clear()


def count_host_work(monkeypatch: pytest.MonkeyPatch) -> HostWork:
    """Counts the work of the host until the end of the test."""
    work, state = HostWork(Counter(), Counter(), []), threading.local()

    def counted(function: Any) -> Any:
        def wait(value: Any, *args: Any, **settings: Any) -> Any:
            if getattr(state, "inside", False) or not any(isinstance(x, ArrayImpl) for x in jax.tree.leaves(value)):
                return function(value, *args, **settings)
            if (site := _calling_function()) is not None and site != "wait_on_cpu":
                work.waits[site] += 1
                work.arrays.append(value)
            # One wait may be implemented by another.
            state.inside = True
            try:
                return function(value, *args, **settings)
            finally:
                state.inside = False

        return wait

    call = Program.__call__

    def counted_call(program: Program, *args: Any) -> Any:
        work.programs[program.name] += 1
        return call(program, *args)

    monkeypatch.setattr(Program, "__call__", counted_call)
    for module, name in _FUNCTIONS:
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    for name in _METHODS:
        monkeypatch.setattr(ArrayImpl, name, counted(getattr(ArrayImpl, name)))
    # `float`, `int`, `bool` and NumPy's functions read this property.
    monkeypatch.setattr(ArrayImpl, "_value", property(counted(ArrayImpl._value.fget)))  # pyright: ignore[reportAttributeAccessIssue]
    return work


def _calling_function() -> str | None:
    """Returns the innermost function of the package among the callers; None if there is none."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_PACKAGE):
            return frame.f_code.co_qualname
        frame = frame.f_back
    return None
