"""Event loops for Orbax that end when their tasks have ended."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import warnings
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def patient_loops() -> Iterator[None]:
    """Has the event loops that are made meanwhile wait for their tasks before they close.

    Orbax closes a loop with the first array that cannot be read, while TensorStore still reads others. Each of those
    then finds a closed loop, for which TensorStore prints a traceback, and an error that nobody asks for, which asyncio
    prints.
    """
    policy = _exchange_policy(_PatientPolicy())
    try:
        # From inside a loop Orbax makes another by uvloop, where that is installed.
        with _in_place_of_uvloop():
            yield
    finally:
        _exchange_policy(policy)


def keep_loops_patient() -> None:
    """Has all event loops that are made from now on wait for their tasks before they close, as in `patient_loops`."""
    _exchange_policy(_PatientPolicy())


def _exchange_policy(policy: Any) -> Any:
    """Sets the policy that makes event loops, and returns the one before."""
    with warnings.catch_warnings():
        # Deprecated since Python 3.14, where Orbax's loops still come from it.
        warnings.simplefilter("ignore", DeprecationWarning)
        before = asyncio.get_event_loop_policy()
        asyncio.set_event_loop_policy(policy)
    return before


@contextlib.contextmanager
def _in_place_of_uvloop() -> Iterator[None]:
    try:
        uvloop: Any = importlib.import_module("uvloop")
    except ImportError:
        yield
        return
    make, uvloop.new_event_loop = uvloop.new_event_loop, _PatientLoop
    try:
        yield
    finally:
        uvloop.new_event_loop = make


class _PatientLoop(asyncio.SelectorEventLoop):
    def close(self) -> None:
        if not self.is_closed() and not self.is_running() and (tasks := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        # Of the tasks that fail, Orbax asks for the error of the first.
        if context.get("message") != "Task exception was never retrieved":
            super().call_exception_handler(context)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)

    class _PatientPolicy(asyncio.DefaultEventLoopPolicy):
        _loop_factory = _PatientLoop
