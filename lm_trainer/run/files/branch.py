"""The start of a branch: a run that shares the steps of another run up to some step, recorded in its run.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from lm_trainer.core.errors import UserError

BRANCH = "branch"
"""Key of the start in run.json."""


@dataclass(frozen=True)
class BranchPoint:
    """The step at which a branch leaves its parent."""

    parent: str
    """ID of the parent run."""
    directory: str
    """Run directory of the parent, or the URL of its checkpoints in a bucket."""
    step: int
    """Number of completed steps that the branch shares with the parent."""
    checkpoint: int
    """Step of the parent's checkpoint from which `step` was reached; 0 for the start of the parent."""
    differences: tuple[str, ...] = ()
    """Settings that affect the results and differ from the parent's, as `KEY: was OLD, now NEW`."""
    fresh_optimizer: bool = False
    """True if the optimizer begins with a new state."""
    other_measurements: bool = False
    """True if only one of branch and parent measures the largest attention logits, for `qk_clip` of the optimizer."""
    other_data: bool = False
    """True if the branch reads other data than the parent, or in another order."""
    cpu_threads: int | None = None
    """Number of CPU threads with which the parent computed the step."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any], source: object) -> BranchPoint | None:
        """Reads the start of a branch from the content of run.json; None for a run that is no branch.

        Raises:
            UserError: if the entry is damaged.
        """
        content = record.get(BRANCH)
        if content is None:
            return None
        try:
            values = {field.name: content[field.name] for field in fields(cls) if field.name in content}
            point = cls(**{**values, "differences": tuple(map(str, values.get("differences", ())))})
            if not (isinstance(point.parent, str) and isinstance(point.directory, str) and point.step >= 1):
                raise ValueError
        except (TypeError, ValueError, KeyError):
            raise UserError(f"{source}: the entry {BRANCH} is damaged; put back a copy of the file") from None
        return point

    def to_record(self) -> dict[str, Any]:
        """Returns the entry for run.json."""
        return {**asdict(self), "differences": list(self.differences)}

    @property
    def changes_state(self) -> bool:
        """True if the training state of the branch has other arrays than the parent's."""
        return self.fresh_optimizer or self.other_measurements

    def notes(self) -> list[str]:
        """Returns notes for the user at the first step of the branch."""
        changes = "".join(f"\n  {line}" for line in self.differences)
        changed = f"with changes:{changes}" if changes else "unchanged"
        notes = [f"branch of {self.parent} at step {self.step}, {changed}"]
        if self.fresh_optimizer:
            notes.append(f"the state of the optimizer is new at step {self.step}, because it is another optimizer")
        # Without some documents, all rows are the same.
        if self.other_data and not all(line.startswith("data.without") for line in self.differences):
            notes.append(
                f"the data or their order change from step {self.step} on; rows that were read before may come again"
            )
        return notes

    def same_start(self, other: BranchPoint) -> bool:
        """Returns True if both begin at the same step of the same run, with the same changes."""
        return (self.parent, self.step, self.differences) == (other.parent, other.step, other.differences)
