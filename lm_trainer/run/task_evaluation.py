"""Tasks of lm-evaluation-harness that a model is asked while it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm_trainer.harness.config import quiet_bars
from lm_trainer.harness.report import task_metrics, write_samples
from lm_trainer.parallel.processes import is_lead
from lm_trainer.run.hooks import StepInfo
from lm_trainer.run.local_params import local_params
from lm_trainer.run.loop_parts import LoopParts

if TYPE_CHECKING:
    from pathlib import Path

    from lm_trainer.data.tokenizer import HfTokenizer
    from lm_trainer.export.settings import HfSettings
    from lm_trainer.run.config import RunConfig


class TaskEvaluation:
    """A hook that asks the model the tasks of `eval_harness`, with the weights that would be exported.

    Args:
        config: of the run.
        tokenizer: of the run.
        settings: of the published model that it comes from.

    Raises:
        UserError: for a task that there is not, and data that cannot be read.
    """

    def __init__(self, config: RunConfig, tokenizer: HfTokenizer, settings: HfSettings | None = None):
        quiet_bars()
        from lm_trainer.harness.run import Tasks

        assert config.eval_harness is not None
        self._config, self._tokenizer, self._settings = config, tokenizer, settings
        self._tasks = Tasks(config.eval_harness)

    def add_to(self, loop: LoopParts, run_dir: Path) -> None:
        """Adds the hook to those of a loop, where it is due every `eval_harness_steps` steps and at the end."""
        loop.hooks.add(lambda info: self._ask(info, loop, run_dir), every=self._config.eval_harness_steps)

    def _ask(self, info: StepInfo, loop: LoopParts, run_dir: Path) -> None:
        from lm_trainer.harness.model import HarnessModel

        harness = self._config.eval_harness
        assert harness is not None
        loop.metrics.flush()
        loop.progress.phase("asking the tasks of eval_harness")
        # The last set of weights is the one to export.
        weights = [*loop.program.weights(info.state).values()][-1]
        params = local_params(loop.program, weights)
        model = HarnessModel(
            loop.program.model.merge(params),
            self._tokenizer,
            settings=self._settings,
            dtype=self._config.trainer.mp.compute_dtype,
            max_length=harness.max_eval_length,
        )
        found = self._tasks.ask(model)
        loop.metrics.asked(info.step, task_metrics(found))
        if harness.log_samples and is_lead():
            write_samples(run_dir / "eval-harness" / f"step-{info.step}", found)
