"""The end of a run for the person at the terminal: what came out, where everything is, and what to do next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lm_trainer.core.bucket import StoragePath

_PROMPT_CHARS = 24
"""Characters of the sample's prompt that are offered as a prompt of one's own."""


@dataclass
class Summary:
    """The outcome of an attempt at a run."""

    name: str
    run_dir: Path
    checkpoints: StoragePath
    step: int
    train_loss: float = math.nan
    """In nats per token, of the last step of this attempt; NaN when there was nothing left to do."""
    eval_losses: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    """Wall time of this attempt."""
    sample: str | None = None
    """A prompt and what the model makes of it, or what is said in a recording and what the model hears."""
    takes_audio: bool = False
    """True of a model that writes what it hears, and goes on from no text."""
    exports: bool = True
    """True of a model for which transformers' format has a place."""
    gaps: Sequence[str] = ()
    """A line about each file of metrics that lacks steps of the run."""

    def lines(self) -> list[str]:
        """The end of the terminal's output: what came out, and where everything is."""
        if math.isnan(self.train_loss) and not self.eval_losses:
            complete = "has all its steps, but not all their metrics" if self.gaps else "was complete already"
            result = [f"run {self.name} {complete}, after step {self.step}"]
        else:
            losses = {"train loss": self.train_loss, **{f"{k} loss": v for k, v in self.eval_losses.items()}}
            text = ", ".join(f"{name} {value:.4f}" for name, value in losses.items())
            result = [f"done: step {self.step}, {text}, in {self.seconds:.0f} s"]
        result += [f"warning: {gap}" for gap in self.gaps]
        if self.sample is not None:
            before = "what is said" if self.takes_audio else "the prompt"
            origin = f"sample (up to ⟫ it is {before}, from there on the model's):"
            result += ["", origin, *(f"  | {line}" for line in self.sample.splitlines()), ""]
        return [
            *result,
            f"  metrics      {self.run_dir / 'metrics.jsonl'}",
            f"  checkpoints  {_shortest(self.checkpoints)}",
            "next:",
            *(f"  {command}" for command in self._next_commands()),
        ]

    def _next_commands(self) -> Iterator[str]:
        """Commands to go on with, which work as they are written, but for the file of a recording."""
        run = self.name if self.run_dir.parent.absolute() == Path("logs").absolute() else shlex.quote(str(self.run_dir))
        text = (self.sample or "").partition("⟫")[0]
        begun = next((line.strip() for line in text.splitlines() if line.strip()), "The")[:_PROMPT_CHARS]
        if self.takes_audio:
            yield f"lmt transcribe {run} FILE"
        else:
            yield f"lmt generate {run} --prompt {shlex.quote(begun.rpartition(' ')[0] or begun)}"
        yield f"lmt report {run}"
        yield f"lmt export-hf {run} {shlex.quote(f'exports/{self.name}')}" if self.exports else "lmt runs"


def _shortest(path: StoragePath) -> StoragePath:
    if not isinstance(path, Path):
        return path
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
