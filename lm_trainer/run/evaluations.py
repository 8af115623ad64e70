"""Evaluation on held-out sets while a run trains."""

from __future__ import annotations

from lm_trainer.health.watchdog import Watchdog
from lm_trainer.run.batches import DataWait, EvalData
from lm_trainer.run.hooks import is_due
from lm_trainer.run.metrics import MetricLogger
from lm_trainer.run.program import Program
from lm_trainer.run.trainer_config import TrainerConfig
from lm_trainer.step.state import TrainState
from lm_trainer.trackers import Progress

EvalSets = list[tuple[str | None, EvalData]]
"""Held-out sets by name; None for the only one."""


class Evaluations:
    """The held-out sets of a run; each is evaluated with the weights, and with their average if the run keeps one."""

    def __init__(  # noqa: PLR0913 - an evaluation touches all of them
        self,
        sets: EvalSets,
        config: TrainerConfig,
        program: Program,
        metrics: MetricLogger,
        data_wait: DataWait,
        watchdog: Watchdog,
        progress: Progress,
    ):
        self._every, self._max_batches = config.steps_per_eval, config.max_eval_batches
        self._program, self._metrics, self._data_wait = program, metrics, data_wait
        self._watchdog, self._progress = watchdog, progress
        self._sets = sets

    def due(self, step: int) -> bool:
        """True if an evaluation is due after `step` steps."""
        return is_due(self._every, step)

    def run(self, state: TrainState) -> None:
        """Evaluates all sets, each as soon as it is tokenised.

        Raises:
            UserError: when a set will not come.
            Preempted: when a stop signal comes while one is waited for.
        """
        for name, data in self._sets:
            self._run(state, data, name)

    def _run(self, state: TrainState, data: EvalData, name: str | None) -> None:
        # The line of the step stands before that of its evaluation.
        self._metrics.flush()
        self._data_wait.wait(data, state)
        evaluate = self._program.evaluate
        self._progress.phase(f"evaluating{f' on {name}' if name else ''}")
        for weights, params in self._program.weights(state).items():
            batches = data.batches(evaluate.batch_size, rows=evaluate.local_rows, max_batches=self._max_batches)
            watched = self._watchdog.each(batches, f"the evaluation after step {state.step}")
            means = evaluate(params, watched)
            self._metrics.evaluated(state.step, "/".join(filter(None, (weights, name))), means)
