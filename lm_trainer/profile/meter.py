"""Throughput of a run that is in progress."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from lm_trainer.profile.goodput import Goodput


class Meter:
    """Measures tokens per second, step time, MFU and HFU over the most recent steps.

    The time of a step starts at the end of the previous step, so it includes everything between the two steps except
    what `pause` excludes. The first step, which may include compilation, is not timed.

    Args:
        flops_per_token: number of FLOPs of a training step, forward and backward.
        recomputed: number of FLOPs per token that rematerialisation adds; None if unknown.
        peak_flops: peak FLOP/s of all devices of the run, from their datasheets; None if unknown.
        goodput: receives the times of the steps; None disables goodput.
        window: number of most recent steps over which tokens per second, MFU and HFU are averaged.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        *,
        flops_per_token: float,
        peak_flops: float | None,
        recomputed: float | None = None,
        goodput: Goodput | None = None,
        window: int = 20,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._flops_per_token, self._peak, self._recomputed = flops_per_token, peak_flops, recomputed
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=window)
        self._goodput, self._clock = goodput, clock
        self._last: float | None = None

    def record_step(self, tokens: float, *, loading: float = 0.0, done: float | None = None) -> dict[str, float]:
        """Records a step. Must be called when the result of the step is available.

        Args:
            tokens: number of tokens of the step, over all hosts.
            loading: time in seconds that the step waited for data.
            done: clock time at which the step finished; None: now.

        Returns:
            `throughput/loading_time` (s) and the results of `Goodput.record_step` always. From the second step after a
            start or pause on, also `step_time` (s), `tokens_per_second`, `data_wait` (the fraction of the time of these
            steps spent waiting for data, from 0 to 1) and, if their inputs are known, `mfu` and `hfu` in percent.
        """
        finished, last = self._clock() if done is None else done, self._last
        self._last = finished
        metrics: dict[str, float] = {"throughput/loading_time": loading}
        # If the clock has not advanced, there is no rate.
        if last is not None and finished > last:
            # The sum of tokens over the sum of seconds, because a mean of rates would overweight short steps.
            self._steps.append((tokens, finished - last, loading))
            all_tokens, seconds, waited = (sum(column) for column in zip(*self._steps, strict=True))
            speed = all_tokens / seconds
            metrics |= {
                "throughput/step_time": finished - last,
                "throughput/tokens_per_second": speed,
                # Loading and step use different clock readings, so loading may appear to take slightly longer.
                "throughput/data_wait": min(waited / seconds, 1.0),
            }
            if self._peak:
                metrics["throughput/mfu"] = 100 * speed * self._flops_per_token / self._peak
                if self._recomputed is not None:
                    metrics["throughput/hfu"] = 100 * speed * (self._flops_per_token + self._recomputed) / self._peak
        if self._goodput is not None:
            metrics |= self._goodput.record_step(max(metrics.get("throughput/step_time", 0.0) - loading, 0.0))
        return metrics

    def pause(self) -> None:
        """Excludes the time until the end of the next step from training time, for example because of an evaluation."""
        self._last = None
