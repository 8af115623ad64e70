"""Summary for the user at the end of a run, with the results, the locations of files, and commands to run next."""

from __future__ import annotations

import html
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lm_trainer.core.bucket import StoragePath
from lm_trainer.core.html_table import curve_svg
from lm_trainer.trackers.jsonl import read_metrics

_PROMPT_CHARS = 24
"""Maximum number of characters of the sample's prompt that are suggested as a prompt for `lmt generate`."""


@dataclass
class Summary:
    """The outcome of an attempt at a run."""

    name: str
    run_dir: Path
    checkpoints: StoragePath
    step: int
    train_loss: float = math.nan
    """Loss of the last step in this attempt, in nats per token; NaN if the run was already complete."""
    eval_losses: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    """Wall-clock time of this attempt in seconds."""
    sample: str | None = None
    """A prompt and the model's continuation, or the transcript of a recording and the model's transcription."""
    takes_audio: bool = False
    """True for a speech model, which transcribes audio instead of continuing text."""
    exports: bool = True
    """True if the model can be exported to the format of transformers."""
    gaps: Sequence[str] = ()
    """Messages about metrics files with missing steps, one per file."""

    def lines(self) -> list[str]:
        """Returns the lines to print: the results, the locations of files, and commands to run next."""
        if math.isnan(self.train_loss) and not self.eval_losses:
            complete = "has all its steps, but not all their metrics" if self.gaps else "was complete already"
            result = [f"run {self.name} {complete}, after step {self.step}"]
        else:
            losses = {"train loss": self.train_loss, **{f"{k} loss": v for k, v in self.eval_losses.items()}}
            text = ", ".join(f"{name} {value:.4f}" for name, value in losses.items())
            result = [f"done: step {self.step}, {text}, in {self.seconds:.0f} s"]
        result += [f"warning: {gap}" for gap in self.gaps]
        if self.sample is not None:
            source = "what is said" if self.takes_audio else "the prompt"
            origin = f"sample (up to ⟫ it is {source}, from there on the model's):"
            result += ["", origin, *(f"  | {line}" for line in self.sample.splitlines()), ""]
        return [
            *result,
            f"  metrics      {self.run_dir / 'metrics.jsonl'}",
            f"  checkpoints  {_shorten_path(self.checkpoints)}",
            "next:",
            *(f"  {command}" for command in self._next_commands()),
        ]

    def _repr_html_(self) -> str:
        """Returns the same, and the curve of the loss, for a notebook."""
        return f"{loss_curve(self.run_dir)}<pre>{html.escape(chr(10).join(self.lines()))}</pre>"

    def _next_commands(self) -> Iterator[str]:
        """Yields commands that can be run as they are, except for the placeholder of an audio file."""
        run = self.name if self.run_dir.parent.absolute() == Path("logs").absolute() else shlex.quote(str(self.run_dir))
        text = (self.sample or "").partition("⟫")[0]
        start = next((line.strip() for line in text.splitlines() if line.strip()), "The")[:_PROMPT_CHARS]
        if self.takes_audio:
            yield f"lmt transcribe {run} FILE"
        else:
            yield f"lmt generate {run} --prompt {shlex.quote(start.rpartition(' ')[0] or start)}"
        yield f"lmt report {run}"
        yield f"lmt export-hf {run} {shlex.quote(f'exports/{self.name}')}" if self.exports else "lmt runs"


def _shorten_path(path: StoragePath) -> StoragePath:
    if not isinstance(path, Path):
        return path
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def loss_curve(run_dir: Path) -> str:
    """Returns the curve of a run's training loss as SVG; the empty string without two recorded steps."""
    try:
        lines = read_metrics(run_dir)
    except FileNotFoundError:
        return ""
    points = [(line["step"], line["train/loss"]) for line in lines if math.isfinite(line.get("train/loss", math.nan))]
    return curve_svg(points, "train/loss") if len(points) > 1 else ""
