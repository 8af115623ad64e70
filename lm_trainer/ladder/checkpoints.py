"""Checkpoints of a ladder: those that it asks for, and those that lie on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lm_trainer.checkpoint.store import committed_steps
from lm_trainer.core.files import AnyPath, local_path
from lm_trainer.ladder.config import LadderConfig
from lm_trainer.ladder.rungs import batch_shape, count_params, run_name


@dataclass(frozen=True)
class RunCheckpointInfo:
    """A checkpoint that a ladder needs, or has."""

    name: str
    """The place in the recipe, such as `period 2, 1xC pre-decay`."""
    step: int
    tokens: int
    """Tokens that the run has been trained on."""
    path: Path
    metrics_path: Path | None
    """The file with the metrics of its run, if there is one."""
    exists: bool
    """True if it is on disk."""

    def display(self) -> str:
        """One line, with a mark for whether it exists."""
        return f"{'✔' if self.exists else '✘'} {self.name:<28} step {self.step:>8,}  {self.tokens:>16,} tokens"


def find_checkpoints(
    ladder: LadderConfig,
    size_spec: str,
    *,
    seed: int | None = None,
    discover_all: bool = False,
    alternative_dirs: Sequence[AnyPath] | None = None,
) -> list[RunCheckpointInfo]:
    """The checkpoints of a size, in order.

    Args:
        ladder: to look at.
        size_spec: the size.
        seed: of the run; by default the first.
        discover_all: add checkpoints on disk that the ladder did not ask for.
        alternative_dirs: directories of other copies of this ladder, searched in order for what is missing in its own.
    """
    batch = batch_shape(ladder, size_spec).batch_size
    asked = ladder.run_configurator.configure_checkpoint_intervals(count_params(ladder, size_spec), batch)
    # Two checkpoints of a very short run may fall on one step; the later name is the one that holds after it.
    names = {tokens // batch: name for tokens, name in asked}
    run = run_name(ladder, size_spec, seed)
    folders = [local_path(root) / run for root in (ladder.dir, *(alternative_dirs or ()))]
    there = {folder: set(committed_steps(folder / "checkpoints")) for folder in folders}
    extra = set().union(*there.values()) - set(names) if discover_all else set()
    found = []
    for step in sorted({*names, *extra}):
        # A checkpoint that is nowhere belongs to the directory of the ladder itself, where a run would write it.
        folder = next((f for f in folders if step in there[f]), folders[0])
        # A copy may have lost its checkpoints and kept its metrics.
        files = (each / "metrics.jsonl" for each in (folder, *folders))
        found.append(
            RunCheckpointInfo(
                names.get(step, f"step {step}"),
                step,
                step * batch,
                folder / "checkpoints" / str(step),
                next((file for file in files if file.exists()), None),
                step in there[folder],
            )
        )
    return found
