"""asyncio event loops for Orbax that wait for their tasks before they close."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import warnings
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def drain_event_loops_on_close() -> Iterator[None]:
    """Context manager in which new event loops wait for their tasks before they close.

    Orbax closes a loop at the first unreadable array, while TensorStore is still reading other arrays. Each of these
    reads then finds a closed loop: TensorStore prints a traceback, and asyncio prints an error that was never
    retrieved.
    """
    policy = _exchange_policy(_WaitingLoopPolicy())
    try:
        # Inside a running loop, Orbax creates another one with uvloop if it is installed.
        with _replace_uvloop():
            yield
    finally:
        _exchange_policy(policy)


def always_drain_event_loops_on_close() -> None:
    """Makes all future event loops wait for their tasks before they close; see `drain_event_loops_on_close`."""
    _exchange_policy(_WaitingLoopPolicy())


def _exchange_policy(policy: Any) -> Any:
    """Sets the event loop policy and returns the previous one."""
    with warnings.catch_warnings():
        # Event loop policies are deprecated since Python 3.14, but Orbax still creates its loops with them.
        warnings.simplefilter("ignore", DeprecationWarning)
        previous = asyncio.get_event_loop_policy()
        asyncio.set_event_loop_policy(policy)
    return previous


@contextlib.contextmanager
def _replace_uvloop() -> Iterator[None]:
    try:
        uvloop: Any = importlib.import_module("uvloop")
    except ImportError:
        yield
        return
    make, uvloop.new_event_loop = uvloop.new_event_loop, _WaitingLoop
    try:
        yield
    finally:
        uvloop.new_event_loop = make


class _WaitingLoop(asyncio.SelectorEventLoop):
    def close(self) -> None:
        if not self.is_closed() and not self.is_running() and (tasks := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        # If several tasks fail, Orbax retrieves only the first error, so the message about the others is suppressed.
        if context.get("message") != "Task exception was never retrieved":
            super().call_exception_handler(context)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)

    class _WaitingLoopPolicy(asyncio.DefaultEventLoopPolicy):
        _loop_factory = _WaitingLoop
