"""Host threads that enqueue programs side by side.

On a CPU, XLA runs what one thread enqueues for a device in order, and the smaller a program is, the more of it is the
work of a single core. What two threads enqueue runs at the same time, and computes the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lm_trainer.core.runtime import available_cores

T = TypeVar("T")

_ON_A_CPU = 2
"""More than two gave nothing more on two cores, and each takes memory."""


def programs_at_once(platform: str, groups: int, group_size: int = 1) -> int:
    """How many programs each of so many groups of `group_size` devices of this process computes at the same time."""
    # Programs of several emulated devices wait for one another: see `wait_on_cpu`.
    return _ON_A_CPU if platform == "cpu" and group_size == 1 and available_cores() >= _ON_A_CPU * groups else 1


class DispatchThreads:
    """Calls functions in `count` threads by turns, or with 1 where it is called itself."""

    def __init__(self, count: int):
        pools = [ThreadPoolExecutor(1, thread_name_prefix="stream") for _ in range(count if count > 1 else 0)]
        self._next = itertools.cycle(pools) if pools else None

    def __call__(self, function: Callable[..., T], *args: object) -> T:
        """Calls the function in the next thread, and returns what it returns or raises what it raises."""
        if self._next is None:
            return function(*args)
        return next(self._next).submit(function, *args).result()
