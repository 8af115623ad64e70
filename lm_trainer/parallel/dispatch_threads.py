"""Host threads that dispatch programs side by side.

On a CPU, XLA runs the programs that one thread dispatches to a device in order, and the smaller a program is, the more
of its time a single core works while the others are idle. Programs from two threads overlap, and compute the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lm_trainer.core.runtime import available_cores

T = TypeVar("T")

_ON_A_CPU = 2
"""Threads on a CPU. More than two gained nothing on two cores, and each holds the memory of one more microbatch."""


def programs_at_once(platform: str, groups: int, group_size: int = 1) -> int:
    """Number of programs that each of `groups` groups of `group_size` devices of this process runs at a time."""
    # A group of several emulated devices waits for each of its programs (`wait_on_cpu`), so that none overlap. With
    # fewer cores than threads they would only take memory.
    return _ON_A_CPU if platform == "cpu" and group_size == 1 and available_cores() >= _ON_A_CPU * groups else 1


class DispatchThreads:
    """Calls functions in `count` threads by turns; with a count of 1, in the calling thread."""

    def __init__(self, count: int):
        pools = [ThreadPoolExecutor(1, thread_name_prefix="dispatch") for _ in range(count if count > 1 else 0)]
        self._next = itertools.cycle(pools) if pools else None

    def __call__(self, function: Callable[..., T], *args: object) -> T:
        """Calls the function in the next thread; returns its result or raises its exception."""
        if self._next is None:
            return function(*args)
        # This waits for the dispatch alone, which returns before the program has run. Calls thus stay in order, and
        # the arrays that one returns can be the arguments of the next.
        return next(self._next).submit(function, *args).result()
