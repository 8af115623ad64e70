"""Evaluates the model with tasks of lm-evaluation-harness during training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm_trainer.harness.config import disable_progress_bars
from lm_trainer.harness.report import task_metrics, write_samples
from lm_trainer.parallel.processes import is_lead
from lm_trainer.run.training.hooks import StepInfo, is_due
from lm_trainer.run.weights.local_params import gather_full_params

if TYPE_CHECKING:
    from pathlib import Path

    from lm_trainer.data.tokenizer import HfTokenizer
    from lm_trainer.export.settings import HfSettings
    from lm_trainer.run.build.setup import TrainingSetup
    from lm_trainer.run.config.run_config import RunConfig
    from lm_trainer.run.training.metrics import MetricLogger
    from lm_trainer.trackers import Progress


class TaskEvaluation:
    """Runs the tasks in `eval_harness` on the model, with the weights that would be exported.

    Args:
        config: configuration of the run.
        tokenizer: tokenizer of the run.
        run_dir: run directory, to which samples are written.
        settings: settings of the published model that the run started from, if any.

    Raises:
        UserError: if a task is unknown, or its data cannot be read.
    """

    def __init__(self, config: RunConfig, tokenizer: HfTokenizer, run_dir: Path, settings: HfSettings | None = None):
        disable_progress_bars()
        from lm_trainer.harness.run import Tasks

        assert config.eval_harness is not None
        self._config, self._tokenizer, self._run_dir, self._settings = config, tokenizer, run_dir, settings
        self._tasks = Tasks(config.eval_harness)

    def is_due(self, step: int) -> bool:
        """Returns True if the tasks are due after `step` steps."""
        return is_due(self._config.eval_harness_steps, step)

    def run(self, info: StepInfo, setup: TrainingSetup, metrics: MetricLogger, progress: Progress) -> None:
        """Runs the tasks and logs the results."""
        from lm_trainer.harness.model import HarnessModel

        harness = self._config.eval_harness
        assert harness is not None
        metrics.flush()
        progress.phase("asking the tasks of eval_harness")
        # The last entry contains the weights to export.
        weights = [*setup.weights_to_evaluate(info.state).values()][-1]
        params = gather_full_params(setup, weights)
        model = HarnessModel(
            setup.model.merge(params),
            self._tokenizer,
            settings=self._settings,
            dtype=self._config.trainer.mp.compute_dtype,
            max_length=harness.max_eval_length,
        )
        results = self._tasks.evaluate_model(model)
        metrics.log_task_results(info.step, task_metrics(results))
        if harness.log_samples and is_lead():
            write_samples(self._run_dir / "eval-harness" / f"step-{info.step}", results)
