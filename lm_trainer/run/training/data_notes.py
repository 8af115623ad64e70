"""Notes for the user about the data of a run."""

from __future__ import annotations

from collections.abc import Mapping

from lm_trainer.core.errors import UserError
from lm_trainer.data.dataset import Data
from lm_trainer.data.formats.too_long import TooLong
from lm_trainer.data.rows.long_examples import LongExamples
from lm_trainer.parallel.processes import is_lead
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.trackers import Progress

_TREATED: dict[TooLong, str] = {
    "skip": "are left out",
    "left": "are cut at their beginning",
    "right": "are cut at their end",
    "split": "continue in further rows, in which answers have lost their prompts",
}


def row_notes(config: RunConfig, data: Data) -> list[str]:
    """Returns warnings about rows from which nothing is learnt, and about examples longer than a row."""
    trainer, seq_len = config.trainer, config.model.seq_len
    if not is_lead():
        return []
    notes = _long_example_notes(seq_len, data.long_examples())
    if share := data.share_without_loss(trainer.batch_schedule, trainer.num_train_steps):
        notes.append(
            f"warning: in {share:.1%} of the rows no token has a loss, such as where a prompt is longer than a row of "
            f"model.seq_len={seq_len}: nothing is learnt from them"
        )
    return notes


def _long_example_notes(seq_len: int, sets: Mapping[str, LongExamples]) -> list[str]:
    notes = []
    for treatment, treated in _TREATED.items():
        alike = {name: examples for name, examples in sets.items() if examples.treatment == treatment}
        if not alike:
            continue
        counts = "; ".join(examples.describe(name) for name, examples in alike.items())
        longest = max(examples.longest for examples in alike.values())
        notes.append(
            f"warning: {counts} are longer than a row of model.seq_len={seq_len}, and {treated} "
            f"(data.format.on_too_long: {treatment}); the longest takes {longest:,} positions"
        )
    return notes


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
            for note in row_notes(self._config, self._data):
                self._progress.note(note)
            self._reported = True
