"""Notes for the user about the data of a run."""

from __future__ import annotations

from collections.abc import Mapping

from lm_trainer.core.errors import UserError
from lm_trainer.data.dataset import Data
from lm_trainer.data.rows.pair_packing import PairPlan
from lm_trainer.parallel.processes import is_lead
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.trackers import Progress


def empty_rows_note(config: RunConfig, data: Data) -> str | None:
    """Returns a warning if nothing is learnt from some rows, or pairs are left out; None if no such data are known."""
    trainer = config.trainer
    if not is_lead():
        return None
    if left_out := data.left_out_pairs():
        return _left_out_note(config, left_out)
    share = data.share_without_loss(trainer.batch_schedule, trainer.num_train_steps)
    if not share:
        return None
    return (
        f"warning: in {share:.1%} of the rows no token has a loss, such as where a prompt is longer than a row of "
        f"model.seq_len={config.model.seq_len}: nothing is learnt from them"
    )


def _left_out_note(config: RunConfig, plans: Mapping[str, PairPlan]) -> str:
    counts = "; ".join(f"{name}: {plan.too_long:,} of {plan.pairs:,}" for name, plan in plans.items())
    longest = max(plan.longest for plan in plans.values())
    return (
        f"warning: {config.loss.content} longer than a row of model.seq_len={config.model.seq_len} are left out "
        f"({counts}); the longest takes {longest:,} positions"
    )


def describe_build(data: Data) -> str:
    """Describes when the first step begins in a run whose text is not yet completely tokenised."""
    because = data.waits_for_all
    if because is None:
        return "the text is tokenised while the run trains on what is there"
    waits = f"the first step waits until all text is tokenised, because of {because}"
    if "shuffle" not in because:
        return waits
    return f"{waits}; to begin at once, write data.shuffle: {{type: era}}, which draws early batches from early text"


class BuildWatch:
    """Reports once that all text is tokenised, or that tokenisation has failed while no step waits for it."""

    def __init__(self, config: RunConfig, data: Data, progress: Progress):
        self._config, self._data, self._progress, self._reported = config, data, progress, False

    def check(self, step: int) -> None:
        """Checks the progress of tokenisation after a step."""
        if self._reported:
            return
        try:
            self._data.check_builds()
        except UserError as error:
            self._progress.note(f"warning: {error}. Training goes on with the text that is there")
            self._reported = True
        if self._data.complete:
            tokens = self._data.num_train_tokens
            self._progress.note(f"step {step}: all text is tokenised, {tokens:,} training tokens")
            if note := empty_rows_note(self._config, self._data):
                self._progress.note(note)
            self._reported = True
