"""Host threads that dispatch programs concurrently.

On a CPU, XLA runs the programs that one thread dispatches to a device in order. The smaller a program is, the larger is
the fraction of its time in which only one core is busy. Programs dispatched by two threads overlap and compute the same
bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lm_trainer.core.runtime import available_cores

T = TypeVar("T")

_ON_A_CPU = 2
"""Number of threads on a CPU. On two cores, more threads were not faster, and each needs the memory of a microbatch."""


def programs_at_once(platform: str, groups: int, group_size: int = 1) -> int:
    """Returns how many programs each of `groups` groups of `group_size` devices of this process runs at a time."""
    # A group of several emulated devices waits for each of its programs (`wait_on_cpu`), so none of them overlap. With
    # fewer cores than threads, more threads would only take memory.
    return _ON_A_CPU if platform == "cpu" and group_size == 1 and available_cores() >= _ON_A_CPU * groups else 1


class DispatchThreads:
    """Calls functions in `count` threads in rotation; with a count of 1, in the calling thread."""

    def __init__(self, count: int):
        pools = [ThreadPoolExecutor(1, thread_name_prefix="dispatch") for _ in range(count if count > 1 else 0)]
        self._next = itertools.cycle(pools) if pools else None

    def __call__(self, function: Callable[..., T], *args: object) -> T:
        """Calls the function in the next thread. Returns its result or raises its exception."""
        if self._next is None:
            return function(*args)
        # Waits only for the dispatch, which returns before the program has run. Calls therefore stay in order, and the
        # results of one call can be arguments of the next.
        return next(self._next).submit(function, *args).result()
