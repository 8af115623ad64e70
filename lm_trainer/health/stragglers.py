"""Step times of each process of a run, to find a process that makes the others wait.

All processes finish a step together, because they exchange gradients, so the time between two steps does not show which
of them is slow. Each process therefore measures the time that it needs by itself, and sends it with the flags that the
processes exchange after each step.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import numpy as np

from lm_trainer.health.alerts.sender import Alerts
from lm_trainer.health.alerts.straggler import Straggler

Mark = Literal["gathered", "computed", "done"]


class OwnTime(NamedTuple):
    """Seconds of a step that a process needed by itself."""

    host: float = 0.0
    """From the end of the previous step until the host enqueued the step; 0 if the host was ahead of its devices."""
    devices: float = 0.0
    """From the end of the gather of parameters until the devices had computed their microbatches; 0 if the step gathers
    layer by layer, which makes devices wait for one another at each layer."""


@dataclass
class _Step:
    enqueued: float
    times: dict[Mark, Future[float | None]]

    def own_time(self, previous_done: float) -> OwnTime:
        gathered, computed = (self.times[m].result() if m in self.times else None for m in ("gathered", "computed"))
        devices = computed - gathered if gathered is not None and computed is not None else 0.0
        return OwnTime(max(self.enqueued - previous_done, 0.0), max(devices, 0.0))


class StepTimer:
    """Measures the own time of this process in each step, without making the main thread wait.

    Call `begin` before a step is enqueued, `mark` for arrays that the step has enqueued, and `end` after the step.

    Args:
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        # One thread is enough, because arrays become ready in the order in which they were enqueued.
        self._waiting = ThreadPoolExecutor(1, "step timer")
        self._steps: deque[_Step] = deque()
        self._previous_done: float | None = None
        self.own_time = OwnTime()
        """Own time of the newest measured step."""
        self.step_time = 0.0
        """Seconds between the ends of the two newest measured steps."""

    def begin(self) -> None:
        """Records that the host enqueues a step, and measures earlier steps that are done."""
        while self._steps and self._steps[0].times["done"].done():
            step = self._steps.popleft()
            done = step.times["done"].result()
            if done is not None and self._previous_done is not None:
                self.own_time, self.step_time = step.own_time(self._previous_done), done - self._previous_done
            self._previous_done = done
        self._steps.append(_Step(self._clock(), {}))

    def mark(self, name: Mark, arrays: Sequence[jax.Array]) -> None:
        """Records the time at which all arrays of the current step are ready."""
        self._steps[-1].times[name] = self._waiting.submit(self._wait_and_read_clock, arrays)

    def end(self, loss: jax.Array) -> None:
        """Records the end of the current step, at which its loss is ready."""
        self.mark("done", [loss])

    def _wait_and_read_clock(self, arrays: Sequence[jax.Array]) -> float | None:
        try:
            jax.block_until_ready(arrays)
        except RuntimeError:  # consumed by a later program, so the time is unknown
            return None
        return self._clock()

    def close(self) -> None:
        """Ends the thread. Calling it twice is safe."""
        self._waiting.shutdown(cancel_futures=True)


class Stragglers:
    """Collects the own times of all processes, and sends an alert if one of them makes the others wait.

    Args:
        config: settings of the alert; None turns the alert off.
        alerts: sends alerts.
        names: names of the processes, in order; empty for a run of one process, which is not measured.
    """

    def __init__(self, config: Straggler | None, alerts: Alerts, names: Sequence[str]):
        self._config, self._alerts, self._names = config, alerts, names
        steps = Straggler().steps if config is None else config.steps
        self._own_times: deque[np.ndarray] = deque(maxlen=steps)
        self._step_times: deque[float] = deque(maxlen=steps)
        self.timer = StepTimer() if names else None

    def to_send(self) -> OwnTime:
        """Returns the newest own time of this process."""
        return OwnTime() if self.timer is None else self.timer.own_time

    def receive(self, step: int, seconds: np.ndarray | None) -> None:
        """Receives the own times of all processes after a step, float32 [processes, 2]; None if there are none."""
        if self.timer is None or seconds is None:
            return
        self._own_times.append(seconds)
        self._step_times.append(self.timer.step_time)
        if self._config is not None and len(self._own_times) == self._own_times.maxlen:
            message = self._find_straggler(self._config)
            if message is not None:
                self._alerts.report_straggler(step, message)

    def metrics(self) -> dict[str, float]:
        """Returns the own times of the slowest and of the median process in the newest step, in seconds."""
        if not self._own_times:
            return {}
        totals = self._own_times[-1].sum(axis=1)
        return {
            "throughput/slowest_process": int(totals.argmax()),
            "throughput/slowest_process_time": float(totals.max()),
            "throughput/median_process_time": statistics.median_low(totals.tolist()),
        }

    def close(self) -> None:
        """Ends the thread of the timer. Calling it twice is safe."""
        if self.timer is not None:
            self.timer.close()

    def _find_straggler(self, config: Straggler) -> str | None:
        means_P2 = _means_without_outliers(np.stack(self._own_times))
        totals = means_P2.sum(axis=1).tolist()
        # With two processes, this is the faster one.
        usual, step_time = statistics.median_low(totals), statistics.mean(self._step_times)
        slowest = int(np.argmax(totals))
        lost = totals[slowest] - usual
        if lost < max(config.share * step_time, config.least):
            return None
        host, devices = means_P2[slowest].tolist()
        return (
            f"{self._names[slowest]} makes the others wait for {lost:.3g} s of a step of {step_time:.3g} s (means of "
            f"{config.steps} steps): its host and data take {host:.3g} s, its devices {devices:.3g} s, and a "
            f"usual process takes {usual:.3g} s for both; `lmt bench hardware` there checks its devices"
        )


def _means_without_outliers(times: np.ndarray) -> np.ndarray:
    """Returns means over axis 0, without the tenth of the values that is largest."""
    # A checkpoint or an evaluation makes single steps long. Frequent pauses would not show in a median.
    return np.sort(times, axis=0)[: max(1, len(times) * 9 // 10)].mean(axis=0)
