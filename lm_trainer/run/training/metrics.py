"""Logs the metrics of a run: reads them one step late, checks that they are finite, and passes them to the trackers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from lm_trainer.checkpoint.digest import compute_hashes
from lm_trainer.core.errors import NonFiniteError
from lm_trainer.health.alerts.sender import Alerts
from lm_trainer.profile.meter import Meter
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.files.fingerprint import compute_fingerprint, extend_chain
from lm_trainer.run.training.bad_batches import BadBatchDump
from lm_trainer.run.training.hooks import StepInfo, read_scalar
from lm_trainer.step.state.train_state import TrainState
from lm_trainer.step.updates.norms import Watcher
from lm_trainer.trackers import Progress
from lm_trainer.trackers.base import Composite

_NAMED = ("loss", "grad_norm", "tokens")
_EMPTY_STEPS = "data/steps_without_loss_tokens"
"""Name of the metric with the number of steps so far in which no token had a loss. It is logged at each such step."""


class _Pending(NamedTuple):
    """A step whose metrics have not been read yet. Its state is not included, because the next step donates it."""

    step: int
    metrics: Mapping[str, jax.Array]
    learning_rate: float | None
    tokens: int
    total_tokens: int
    loading: float
    done: Future[float]
    """Completion time of the step, in seconds of `time.perf_counter`."""


class MetricLogger:
    """Reads the metrics of a step after the next step has been dispatched, so that logging never stalls a device.

    Attributes:
        train_loss: loss of the last step whose metrics were read.
        eval_losses: losses of the last evaluation, by name.
        empty_steps: number of steps of the run in whose batch no token had a loss.
        chain: hash chain over the losses and gradient norms of all steps read so far (see `extend_chain`).
    """

    def __init__(  # noqa: PLR0913 - a step reports to all of them
        self,
        config: TrainerConfig,
        trackers: Composite,
        progress: Progress,
        meter: Meter,
        watcher: Watcher,
        measure_memory: Callable[[], dict[str, float]],
        *,
        bad_batches: BadBatchDump,
        alerts: Alerts,
        chain: str = "",
        empty_steps: int = 0,
    ):
        self._config, self._trackers, self._progress, self._meter = config, trackers, progress, meter
        self._watcher, self._bad_batches, self._alerts = watcher, bad_batches, alerts
        self._measure_memory = measure_memory
        self._pending: _Pending | None = None
        # A thread waits for the step, because dispatching the next step can block until long after this one is done.
        self._waiting = ThreadPoolExecutor(1, "step done")
        self.train_loss = math.nan
        self.eval_losses: dict[str, float] = {}
        self.chain, self.empty_steps = chain, empty_steps
        self._warned_of_empty = False

    def record_step(self, info: StepInfo) -> None:
        """Receives a step that was just dispatched, and records the previous step."""
        # Metrics are read one step late, so that the devices have the next step queued while the host waits for this
        # one.
        self.flush()
        self._pending = _Pending(
            info.step,
            info.metrics,
            info.learning_rate,
            info.tokens,
            info.total_tokens,
            info.loading,
            self._waiting.submit(_wait_and_read_clock, info.metrics["loss"]),
        )

    def flush(self) -> None:
        """Waits for the last step and records it.

        Raises:
            NonFiniteError: if the loss or the gradient is not finite, and the configuration requires the run to stop in
                this case.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        values = {name: read_scalar(x) for name, x in pending.metrics.items()}
        speed = self._meter.record_step(pending.tokens, loading=pending.loading, done=pending.done.result())
        empty = not values["tokens"]
        if not empty:
            self.train_loss = values["loss"]
        # The chain is extended before anything can fail, because it must cover every applied step.
        self.chain = extend_chain(self.chain, pending.step, values["loss"], values["grad_norm"])
        of_step = step_metrics(values, pending.learning_rate)
        metrics = {**of_step, "throughput/total_tokens": pending.total_tokens, **speed}
        if empty:
            metrics |= self._count_empty_step(pending.step)
        # The last step, non-finite steps and empty steps are always logged, regardless of `steps_per_log`.
        last = pending.step == self._config.num_train_steps
        if last or pending.step % self._config.steps_per_log == 0 or empty or not _all_finite(values):
            self._trackers.log(metrics | self._measure_memory(), step=pending.step)
        self._progress.log(pending.step, metrics)
        self._record_watched(pending.step)
        try:
            self._check_finite(pending.step, values)
        finally:
            # Alerts are also checked for the step that ends the run, after its message. The loss of an empty step is 0
            # by definition, which is meaningless for alerts and would distort the baseline for later losses.
            if not empty:
                self._alerts.check_step(pending.step, of_step, speed)

    def _count_empty_step(self, step: int) -> dict[str, float]:
        self.empty_steps += 1
        if not self._warned_of_empty:
            self._warned_of_empty = True
            self._progress.note(
                f"warning: step {step}: no token of its batch has a loss, so that its loss and gradient are 0; "
                f"{_EMPTY_STEPS} counts such steps"
            )
        return {_EMPTY_STEPS: self.empty_steps}

    def _record_watched(self, step: int) -> None:
        for watched in self._watcher.report(until=step):
            if watched.scalars:
                self._trackers.log(watched.scalars, step=watched.step)
            for name, (counts, edges) in watched.histograms.items():
                self._trackers.log_histogram(name, counts, edges, step=watched.step)

    def log_evaluation(self, step: int, name: str, means: Mapping[str, float]) -> None:
        """Records an evaluation after `step` steps. `name` is the name of the set, or "" for a single set."""
        self.eval_losses[name or "validation"] = means["loss"]
        metrics = evaluation_metrics(name, means)
        self._trackers.log(metrics, step=step)
        self._progress.note(f"step {step}: " + ", ".join(f"{key} {value:.4f}" for key, value in metrics.items()))
        # Excludes the time of the evaluation from the throughput.
        self._meter.pause()

    def log_group_evaluation(self, step: int, name: str, means: Mapping[str, float]) -> None:
        """Records the means over several sets after `step` steps.

        `name` is the name of the group, or "" for all sets.
        """
        self._trackers.log(evaluation_metrics(name, means), step=step)
        prefix = f"step {step}: eval{f'/{name}' if name else ''}: "
        self._progress.note(prefix + ", ".join(f"{key} {value:.4f}" for key, value in means.items()))

    def log_task_results(self, step: int, results: Mapping[str, float]) -> None:
        """Records the results of harness tasks after `step` steps, by metric name."""
        self._trackers.log(results, step=step)
        self._progress.note(f"step {step}: " + ", ".join(f"{key} {value:.4f}" for key, value in results.items()))
        self._meter.pause()

    def pause(self) -> None:
        """Records the previous step, and excludes the time until the next step is done from the throughput."""
        self.flush()
        self._meter.pause()

    def record_fingerprint(self, state: TrainState) -> dict[str, Any]:
        """Logs the fingerprint of a state whose metrics are recorded. Returns the values to save in its checkpoint."""
        param_hashes = compute_hashes(state.params)
        digest = compute_fingerprint(self.chain, param_hashes)
        self._trackers.log_record({"fingerprint": digest}, step=state.step)
        return {"fingerprint": digest, "chain": self.chain, "hashes": param_hashes}

    def sync(self) -> Mapping[str, Any]:
        """Flushes all records to disk before a checkpoint. Returns the values to save in it (see `Composite.sync`)."""
        return self._trackers.sync()

    def close(self) -> None:
        """Ends the thread that waits for steps. Calling it twice is safe."""
        self._waiting.shutdown()

    def finish(self, step: int, sample: str | None) -> None:
        """Records the final results of the run."""
        self._trackers.log_summary({"step": step, "train_loss": self.train_loss, "eval_losses": self.eval_losses})
        if sample is not None:
            self._trackers.log_text("sample", sample, step=step)

    def _check_finite(self, step: int, values: dict[str, float]) -> None:
        bad = {name: value for name, value in values.items() if not math.isfinite(value)}
        if not bad:
            return
        file = self._bad_batches.write(step)
        description = ", ".join(f"{name} is {value}" for name, value in bad.items())
        # The update checks only these two values. Other non-finite values do not prevent it.
        applied = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
        message = f"step {step}: {description}; the step was {'' if applied else 'not '}applied"
        message += f"; its batch is in {file}" if file else ""
        config = self._config
        if not any(config.crash_on_nan if math.isnan(value) else config.crash_on_inf for value in bad.values()):
            self._progress.note(message)
            return
        raise NonFiniteError(
            f"{message}. Lower optimizer.learning_rate, look at the data of this step (`lmt replay`), or set "
            f"trainer.crash_on_nan and trainer.crash_on_inf to false to skip such steps"
        )


def _wait_and_read_clock(x: jax.Array) -> float:
    x.block_until_ready()
    return time.perf_counter()


def step_metrics(values: Mapping[str, float], learning_rate: float | None) -> dict[str, float]:
    """Returns the reproducible metrics of a step (all except throughput) by the name under which they are logged.

    Args:
        values: scalars that the step returned.
        learning_rate: learning rate of the step; None if the optimizer has an internal schedule, which may report the
            learning rate itself.
    """
    return {
        "train/loss": values["loss"],
        "optim/grad_norm": values["grad_norm"],
        **({} if learning_rate is None else {"optim/learning_rate": learning_rate}),
        "data/loss_tokens": values["tokens"],
        **{_metric_name(name): value for name, value in values.items() if name not in _NAMED},
    }


def evaluation_metrics(name: str, means: Mapping[str, float]) -> dict[str, float]:
    """Returns the means of an evaluation by the name under which they are logged.

    `name` names the set or group, or is "".
    """
    return {"/".join(filter(None, ("eval", name, key))): value for key, value in means.items()}


def _metric_name(name: str) -> str:
    """Adds the group `train/` to the name of a metric of the loss function. Optimizer metrics already have a group."""
    return name if name.startswith("optim/") else f"train/{name}"


def _all_finite(values: dict[str, float]) -> bool:
    return all(math.isfinite(v) for v in values.values())
