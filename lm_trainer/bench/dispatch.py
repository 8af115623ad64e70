"""Measures how long the host takes to dispatch the programs of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import jax

from lm_trainer.bench.session import BenchSession
from lm_trainer.core.jax_types import PyTree
from lm_trainer.profile.timing import BenchResult, Spread

_WARMUP = 2
"""Number of untimed steps, which fill caches."""


@dataclass(frozen=True)
class DispatchTimes:
    """Times of a step in seconds."""

    host: Spread
    """Processor time of the dispatching thread, which excludes other work on the machine and waits for devices."""
    step: Spread
    """Time from the first program until all results are computed."""

    @property
    def share(self) -> float:
        """Ratio of the host's time to the step's time."""
        return self.host.median / self.step.median


def time_dispatch(dispatch_step: Callable[[], PyTree], *, steps: int) -> DispatchTimes:
    """Times steps.

    Args:
        dispatch_step: enqueues one step, whose inputs are on the devices, and returns its results.
        steps: number of timed steps.
    """
    host_seconds, step_seconds = [], []
    for _ in range(_WARMUP + steps):
        started, busy = time.perf_counter(), time.thread_time()
        results = dispatch_step()
        host_seconds.append(time.thread_time() - busy)
        jax.block_until_ready(results)
        step_seconds.append(time.perf_counter() - started)
    return DispatchTimes(*(Spread.from_values(seconds[_WARMUP:]) for seconds in (host_seconds, step_seconds)))


def measure_dispatch(session: BenchSession, *, steps: int) -> BenchResult:
    """Times the dispatch of the step of a session; see `time_dispatch`."""
    times = time_dispatch(session.dispatch_step, steps=steps)
    rows = [
        ("host", f"{times.host.format_milliseconds()} of processor time in the dispatching thread"),
        ("step", times.step.format_milliseconds()),
        ("share", f"{times.share:.1%} of a step; devices wait for the host if it comes close to 100 %"),
    ]
    values = {"host_seconds": times.host.as_dict(), "step_seconds": times.step.as_dict(), "share": times.share}
    return BenchResult(rows, values)
