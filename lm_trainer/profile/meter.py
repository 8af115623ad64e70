"""Throughput of a run while it runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from lm_trainer.profile.goodput import Goodput


class Meter:
    """Tokens per second, step time, MFU and HFU over the last steps.

    A step's time runs from the moment the step before it was done, so it includes everything between two steps but
    what `pause` leaves out. The first step, which may include compilation, has no time.

    Args:
        flops_per_token: of a training step, forward and backward.
        recomputed: what rematerialisation adds to them; None where it is not known.
        peak_flops: FLOP/s of all devices of the run by their datasheet; None where it is not known.
        goodput: takes the time of the steps; None: it is not asked for.
        window: number of last steps that tokens per second, MFU and HFU are taken over.
        clock: seconds that only grow.
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

    def step(self, tokens: float, *, loading: float = 0.0, done: float | None = None) -> dict[str, float]:
        """Called when a step is done, that is, when its result has been waited for.

        Args:
            tokens: of the step, over all hosts.
            loading: seconds that the step waited for data.
            done: when it was done, by the clock; None: now.

        Returns:
            `throughput/loading_time` (s) always; `step_time` (s) and `tokens_per_second` from the second step after a
            start or pause, and with them `data_wait`, the share of the time of those steps that was spent waiting for
            data, from 0 to 1; `mfu` and `hfu` in percent where what they need is known; the results of `Goodput.step`.
        """
        now, last = self._clock() if done is None else done, self._last
        self._last = now
        metrics: dict[str, float] = {"throughput/loading_time": loading}
        # A clock that did not advance gives no rate.
        if last is not None and now > last:
            # A sum of tokens over a sum of seconds: a mean of rates would weigh short steps too much.
            self._steps.append((tokens, now - last, loading))
            all_tokens, seconds, waited = (sum(column) for column in zip(*self._steps, strict=True))
            speed = all_tokens / seconds
            metrics |= {
                "throughput/step_time": now - last,
                "throughput/tokens_per_second": speed,
                # Loading is timed by another clock reading than the step, and may come out longer by a hair.
                "throughput/data_wait": min(waited / seconds, 1.0),
            }
            if self._peak:
                metrics["throughput/mfu"] = 100 * speed * self._flops_per_token / self._peak
                if self._recomputed is not None:
                    metrics["throughput/hfu"] = 100 * speed * (self._flops_per_token + self._recomputed) / self._peak
        if self._goodput is not None:
            metrics |= self._goodput.step(max(metrics.get("throughput/step_time", 0.0) - loading, 0.0))
        return metrics

    def pause(self) -> None:
        """The time until the next step is done is not training time: an evaluation, for example."""
        self._last = None
