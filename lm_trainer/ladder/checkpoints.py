"""Checkpoints that a ladder needs, and checkpoints on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lm_trainer.checkpoint.store import list_steps
from lm_trainer.core.files import AnyPath, local_path
from lm_trainer.ladder.config import LadderConfig
from lm_trainer.ladder.rungs import batch_shape, count_params, run_name


@dataclass(frozen=True)
class RunCheckpointInfo:
    """A checkpoint of a ladder, which may be on disk or still missing."""

    name: str
    """Position in the recipe, such as `period 2, 1xC pre-decay`."""
    step: int
    tokens: int
    """Number of training tokens up to this checkpoint."""
    path: Path
    metrics_path: Path | None
    """Metrics file of the run, if it exists."""
    exists: bool
    """True if the checkpoint is on disk."""

    def display(self) -> str:
        """Formats the checkpoint as one line, with ✔ if it is on disk and ✘ if it is missing."""
        return f"{'✔' if self.exists else '✘'} {self.name:<28} step {self.step:>8,}  {self.tokens:>16,} tokens"


def find_checkpoints(
    ladder: LadderConfig,
    size_spec: str,
    *,
    seed: int | None = None,
    discover_all: bool = False,
    alternative_dirs: Sequence[AnyPath] | None = None,
) -> list[RunCheckpointInfo]:
    """Lists the checkpoints of a size in order.

    Args:
        ladder: the ladder.
        size_spec: the size.
        seed: seed of the run; by default the first seed of the ladder.
        discover_all: includes checkpoints on disk that the ladder does not need.
        alternative_dirs: directories with other copies of this ladder, searched in order for missing checkpoints.
    """
    batch = batch_shape(ladder, size_spec).batch_size
    requested = ladder.run_configurator.configure_checkpoint_intervals(count_params(ladder, size_spec), batch)
    # In a very short run, two checkpoints may fall on the same step. The name of the later one is used.
    names = {tokens // batch: name for tokens, name in requested}
    run = run_name(ladder, size_spec, seed)
    folders = [local_path(root) / run for root in (ladder.dir, *(alternative_dirs or ()))]
    steps_on_disk = {folder: set(list_steps(folder / "checkpoints")) for folder in folders}
    extra = set().union(*steps_on_disk.values()) - set(names) if discover_all else set()
    checkpoints = []
    for step in sorted({*names, *extra}):
        # A missing checkpoint is listed in the ladder's directory, where a run would write it.
        folder = next((f for f in folders if step in steps_on_disk[f]), folders[0])
        # A copy may have lost its checkpoints but kept its metrics.
        files = (directory / "metrics.jsonl" for directory in (folder, *folders))
        checkpoints.append(
            RunCheckpointInfo(
                names.get(step, f"step {step}"),
                step,
                step * batch,
                folder / "checkpoints" / str(step),
                next((file for file in files if file.exists()), None),
                step in steps_on_disk[folder],
            )
        )
    return checkpoints
