"""What a step leaves behind: metrics for the trackers, a line for the person, a verdict on non-finite numbers."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from lm_trainer.config.run import RunConfig
from lm_trainer.core.errors import NonFiniteError
from lm_trainer.profile.meter import Meter
from lm_trainer.trackers import Progress
from lm_trainer.trackers.base import Composite


class _Pending(NamedTuple):
    step: int
    metrics: dict[str, jax.Array]
    learning_rate: float
    loading: float


class Recorder:
    """Reads the metrics of a step after the next one has been started, so that recording never makes a device wait.

    Attributes:
        train_loss: of the last step that was read.
        eval_losses: of the last evaluation, by name.
    """

    def __init__(self, config: RunConfig, trackers: Composite, progress: Progress, meter: Meter):
        self._config, self._trackers, self._progress, self._meter = config.trainer, trackers, progress, meter
        self._tokens = config.trainer.train_batch_size * config.model.seq_len
        self._pending: _Pending | None = None
        self._loading = 0.0
        self.train_loss = math.nan
        self.eval_losses: dict[str, float] = {}

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Times how long the loop waits for data."""
        started = time.perf_counter()
        yield
        self._loading = time.perf_counter() - started

    def step_done(self, step: int, metrics: dict[str, jax.Array], learning_rate: float) -> None:
        """Takes the metrics of a step that was just enqueued, and records those of the step before."""
        self.flush()
        self._pending = _Pending(step, metrics, learning_rate, self._loading)

    def flush(self) -> None:
        """Waits for the last step and records it.

        Raises:
            NonFiniteError: when its loss or gradient is not finite and the configuration says to stop.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        values = {name: _scalar(x) for name, x in pending.metrics.items()}
        speed = self._meter.step(self._tokens, loading=pending.loading)
        self.train_loss = values["loss"]
        metrics = {
            "train/loss": values["loss"],
            "optim/grad_norm": values["grad_norm"],
            "optim/learning_rate": pending.learning_rate,
            "data/loss_tokens": values["tokens"],
            **speed,
        }
        last = pending.step == self._config.num_train_steps
        if last or pending.step % self._config.steps_per_log == 0 or not _finite(values):
            self._trackers.log(metrics, step=pending.step)
        self._progress.log(pending.step, metrics)
        self._check_finite(pending.step, values)

    def evaluated(self, step: int, losses: dict[str, float]) -> None:
        """Records the losses of an evaluation after `step` steps."""
        self.eval_losses = losses
        metrics = {f"eval/{name}/loss" if len(losses) > 1 else "eval/loss": loss for name, loss in losses.items()}
        self._trackers.log(metrics, step=step)
        self._progress.note(f"step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        self._meter.pause()

    def finish(self, step: int, sample: str | None) -> None:
        """Records what the run came to."""
        self._trackers.log_summary({"step": step, "train_loss": self.train_loss, "eval_losses": self.eval_losses})
        if sample is not None:
            self._trackers.log_text("sample", sample, step=step)

    def _check_finite(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            stop = self._config.crash_on_nan if math.isnan(value) else self._config.crash_on_inf
            if not math.isfinite(value) and stop:
                raise NonFiniteError(
                    f"step {step}: {name} is {value}; the step was not applied. Lower optimizer.learning_rate, look at "
                    f"the data of this step, or set trainer.crash_on_nan and trainer.crash_on_inf to false to skip "
                    f"such steps"
                )


def _finite(values: dict[str, float]) -> bool:
    return all(math.isfinite(v) for v in values.values())


def _scalar(x: jax.Array) -> float:
    """The value of a replicated scalar; waits until it is computed."""
    return float(np.asarray(x.addressable_data(0)))
