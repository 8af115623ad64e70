"""`lmt generate --trace`: finds spans of generated text in the data of the model's run."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cli import clean
from cli.build_progress import build_progress
from lm_trainer.core.errors import UserError


class DataTrace:
    """The data of a run, opened for a search for spans.

    Args:
        model: value of the command's MODEL argument.

    Raises:
        UserError: if the model is not a run, or the run's data no longer exist.
    """

    def __init__(self, model: str):
        from lm_trainer.data import open_data
        from lm_trainer.data.find import Tracer
        from lm_trainer.data.tokenizer.token_bytes import token_texts
        from lm_trainer.reproduce.record import RunRecord
        from lm_trainer.run.weights.open_model import find_hf_directory

        if find_hf_directory(model) is not None:
            raise UserError(
                f"--trace: {model} is a model in Hugging Face's layout, whose data are not known; name a run"
            )
        record = RunRecord.read(model)
        config, working_directory = record.load_config(record.last), Path.cwd()
        # Relative paths in the configuration refer to the directory where the run was started.
        os.chdir(record.root)
        try:
            with build_progress() as show:
                self._data = open_data(
                    config.data, seq_len=config.model.seq_len, seed=config.trainer.seed, on_progress=show
                )
        finally:
            os.chdir(working_directory)
        texts = token_texts(self._data.tokenizer)
        trainer = config.trainer
        self._tracer = Tracer(self._data, trainer.batch_schedule, min(record.last, trainer.num_train_steps), texts)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the data."""
        return self._data.tokenizer

    def find_spans(self, tokens: Sequence[int]) -> list[dict[str, Any]]:
        """Returns the spans of new tokens as plain data: `text`, `tokens`, `where`, `character` and `trained_at`."""
        from lm_trainer.data.find import Match
        from lm_trainer.data.verbatim import longest_spans

        spans = []
        for span in longest_spans(self._data, tokens):
            traced = self._tracer.trace(span.cache, Match(span.first, 0, span.first + span.stop - span.start))
            text = self._data.tokenizer.decode(list(tokens[span.start : span.stop]))
            steps = [training._asdict() for training in traced.trained_at]
            spans.append(
                {"text": text, "tokens": span.stop - span.start, "where": traced.where}
                | {"character": traced.character, "trained_at": steps}
            )
        return spans

    def show(self, tokens: Sequence[int]) -> None:
        """Prints the spans."""
        for line in _span_lines(self.find_spans(tokens)):
            clean.echo(line)


def _span_lines(spans: list[dict[str, Any]]) -> Iterator[str]:

    yield "" if spans else "\nno 8 tokens in a row stand in the data of the run"
    for span in spans:
        steps = ", ".join(str(training["step"]) for training in span["trained_at"][:4]) or "none"
        shown = span["text"].replace("\n", "\\n")
        location = f"{span['where']}, character {span['character']} (steps {steps})"
        yield f"{span['tokens']} tokens stand in {location}: {shown}"
