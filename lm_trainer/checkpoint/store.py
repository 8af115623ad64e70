"""A directory of checkpoints, on disk or in a bucket: saved in the background, verified when read, kept by policy."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import jax

from lm_trainer.checkpoint.digest import digests
from lm_trainer.checkpoint.in_bucket import BucketSteps
from lm_trainer.checkpoint.on_disk import DiskSteps
from lm_trainer.checkpoint.policy import CheckpointerConfig, is_permanent
from lm_trainer.checkpoint.record import FORMAT, CheckpointError, describe, root_cause
from lm_trainer.checkpoint.steps import Holder, Nobody, Steps, set_aside
from lm_trainer.core.bucket import Bucket, StoragePath
from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.seal import sealed
from lm_trainer.parallel.processes import any_process, wait_for_all

__all__ = [
    "KEPT",
    "CheckpointError",
    "CheckpointStore",
    "Restored",
    "committed_steps",
    "read_record",
    "read_step",
    "root_cause",
]

logger = logging.getLogger(__name__)
KEPT = "kept"
"""Key of a record: True if its checkpoint is permanent, as the policy or somebody at the terminal asked when it was
saved. Records of older versions lack it, which do not say whether it is."""

Arrays = dict[str, jax.Array]
T = TypeVar("T")


class Restored(NamedTuple):
    """Content of a checkpoint."""

    step: int
    arrays: Arrays
    record: dict[str, Any]
    """The JSON that was saved with it."""


class CheckpointStore:
    """Saves and restores flat dicts of arrays.

    A step is complete or does not exist, also while it is written or deleted: on disk it appears by a rename, in a
    bucket with one object that is written last. Neither Orbax nor TensorStore verifies array data, so a checksum of
    every array is stored with the step and compared after reading.

    Args:
        directory: of the run's checkpoints alone.
        config: which steps are saved, and which stay.
        holder: keeps other processes out of it; None: none knows it.

    Attributes:
        promised: permanent checkpoints that were there at the start and that `config.keep` does not ask for.
    """

    def __init__(self, directory: StoragePath, config: CheckpointerConfig, holder: Holder | None = None):
        self._steps = _steps_of(directory, config)
        self.directory = self._steps.directory
        self._config = config
        self._saved_at = time.monotonic()
        self._saving: Future[Any] | None = None
        self._holder = holder or Nobody()
        self._writer = self._steps.writer(self._none_usable, self._holder)
        earlier = self.steps()
        # Those of the policy need no record, so few are read. A record that does not say keeps its checkpoint.
        self.promised = [s for s in earlier if not is_permanent(s, config.keep) and self._record(s).get(KEPT, True)]
        self._stay = {*self.promised, *(() if config.delete_old_temp_checkpoints else earlier)}

    def steps(self) -> list[int]:
        """Steps that are committed, in order."""
        return self._steps.committed()

    def record(self, step: int) -> dict[str, Any]:
        """The JSON that was saved with a step; empty when there is none that can be read."""
        return self._record(step) if step in self.steps() else {}

    def _record(self, step: int) -> dict[str, Any]:
        try:
            return self._steps.record(step)
        except CheckpointError:
            return {}

    def promise_note(self) -> str | None:
        """Returns a line for people about checkpoints that stay though the policy does not ask for them; None where
        there are none.
        """
        if not self.promised:
            return None
        steps = f"{', '.join(map(str, self.promised[:8]))}{' ...' if len(self.promised) > 8 else ''}"
        return (
            f"trainer.checkpointer.keep does not ask for the checkpoints of steps {steps}, which were permanent when "
            f"they were saved and stay; {self._writer.how_to_remove(self.promised[0])}"
        )

    def due(self, step: int) -> bool:
        """Returns True if a policy asks for a checkpoint after `step` steps."""
        elapsed = time.monotonic() - self._saved_at
        return is_permanent(step, self._config.keep) or elapsed >= self._config.save_interval.total_seconds()

    def save(self, step: int, arrays: Arrays, record: Mapping[str, Any]) -> None:
        """Copies the arrays off the devices and writes them in the background, after the save before it is done.

        It is permanent if the policy says so now or `record` has KEPT, and stays so under every later policy.

        Raises:
            MachineError: when this or the previous save failed, for a full disk for example.
        """
        # Only a save that is known to be on disk may replace the one before it.
        self.wait()
        self._delete_temporary()
        kept = is_permanent(step, self._config.keep) or record.get(KEPT, False)
        if kept:
            self._stay.add(step)
        facts = {"format": FORMAT, "step": step, "digests": digests(arrays), "shapes": describe(arrays)}
        meta = sealed({**facts, **record, KEPT: kept})
        try:
            self._saving = self._writer.save(step, arrays, meta)
        except Exception as error:
            raise self._save_failed(error) from error
        self._saved_at = time.monotonic()

    def poll(self) -> None:
        """Raises `MachineError` if the save under way has failed, or the directory is held by another process.

        It costs nothing, and waits for nothing.
        """
        self._holder.check_held()
        if self._saving is not None and self._saving.done():
            self.wait()

    def hurry(self) -> None:
        """Ends the saves under way and those to come within the grace period, whole or not at all, in a bucket."""
        self._writer.hurry(self._config.grace_period.total_seconds())

    def wait(self) -> None:
        """Waits until the last save is complete.

        Raises:
            MachineError: when it failed.
        """
        # A save has a thread and three open files of its own until it is asked for its result.
        saving, self._saving = self._saving, None
        try:
            if saving is not None:
                saving.result()
            self._writer.wait()
        except Exception as error:
            raise self._save_failed(error) from error

    def close(self) -> None:
        """Waits and releases the directory."""
        self.wait()
        self._delete_temporary()
        self._writer.close()

    def restore(
        self, like: Mapping[str, jax.ShapeDtypeStruct], step: int | None = None, *, partial: bool = False
    ) -> Restored | None:
        """Reads the newest checkpoint that is intact; None when there is none at all.

        One that cannot be trusted is named and moved aside, and the one before it is used. If none can be used, all
        stay where they are.

        Args:
            like: shape, dtype and sharding of every array.
            step: reads only the checkpoint of this step.
            partial: leave out arrays that the checkpoint lacks, instead of refusing it.

        Raises:
            UserError: when the checkpoint holds another model, or the given step does not exist.
            MachineError: when there are checkpoints, but none can be used.
        """
        steps = self.steps()
        if step is not None and step not in steps:
            raise UserError(f"{self.directory}: there is no checkpoint of step {step} (there are: {steps or 'none'})")
        bad: dict[int, CheckpointError] = {}
        for candidate in [step] if step is not None else reversed(steps):
            try:
                restored = read_step(self.directory, candidate, like, partial=partial)
            except CheckpointError as error:
                bad[candidate] = error
            else:
                self._move_aside(bad)
                return restored
        if bad:
            raise self._none_usable(bad)
        return None

    def _move_aside(self, bad: Mapping[int, CheckpointError]) -> None:
        if bad:
            set_aside(self._writer, bad)
            self._writer.moved()

    def _none_usable(self, bad: Mapping[int, CheckpointError]) -> MachineError:
        return MachineError(
            f"{self.directory}: no checkpoint can be used, and nothing was changed:\n"
            + "".join(f"  step {step}: {why}\n" for step, why in bad.items())
            + "Mend the disk or put back a copy; to start from the beginning, remove the directory or set trainer.id"
        )

    def _delete_temporary(self) -> None:
        """Deletes every temporary checkpoint but the newest."""
        old = [s for s in self._writer.present()[:-1] if not is_permanent(s, self._config.keep) and s not in self._stay]
        # Every process has to list the steps before the first of them is deleted.
        wait_for_all("old checkpoints are known")
        self._writer.delete(old)

    def _save_failed(self, error: Exception) -> MachineError:
        self._writer.discard_unfinished()
        present = self._writer.present()
        saved = f"The checkpoints of steps {present} are untouched" if present else "There are no other checkpoints"
        return MachineError(
            f"{self.directory}: a checkpoint could not be written: {root_cause(error)}. "
            f"{saved}; {self._writer.remedy} and start again"
        )


def _steps_of(directory: StoragePath, config: CheckpointerConfig | None = None) -> Steps:
    return BucketSteps(directory, config) if isinstance(directory, Bucket) else DiskSteps(directory)


def committed_steps(directory: StoragePath) -> list[int]:
    """Lists the steps of a checkpoint directory in order; empty when it does not exist."""
    return _steps_of(directory).committed()


def read_record(directory: StoragePath, step: int) -> dict[str, Any]:
    """Reads the JSON that was saved with a step.

    Raises:
        CheckpointError: when it is missing or damaged.
    """
    return _steps_of(directory).record(step)


def read_step(
    directory: StoragePath,
    step: int,
    like: Mapping[str, jax.ShapeDtypeStruct],
    *,
    prefix: str = "",
    partial: bool = False,
) -> Restored:
    """Reads and verifies one step. Of several processes, all must call it, and it succeeds in all of them or in none.

    Args:
        directory: the checkpoint directory.
        step: its name there.
        like: shape, dtype and sharding of the arrays to read.
        prefix: only arrays whose name begins so need to match `like`; the others are not read.
        partial: leave out arrays that the checkpoint lacks, instead of refusing it.

    Raises:
        CheckpointError: when it is damaged.
        UserError: when it is sound, but holds other arrays.
    """
    steps = _steps_of(directory)
    record = _together(lambda: steps.record(step))
    saved = {k: v for k, v in record["shapes"].items() if k.startswith(prefix)}
    if partial:
        like = {name: x for name, x in like.items() if name in saved}
    _check_same_arrays(directory / str(step), saved, describe(like))
    arrays = _together(lambda: steps.arrays(step, record, like))
    found = digests(arrays)
    wrong = [name for name in arrays if found[name] != record["digests"][name]]
    if wrong:
        raise CheckpointError(f"the checksum differs for {', '.join(wrong[:3])}{' ...' if len(wrong) > 3 else ''}")
    return Restored(step, arrays, record)


def _together(read: Callable[[], T]) -> T:
    """Returns the result of `read`, or raises in all processes if it fails in one of them.

    Otherwise some would go back to an older checkpoint while the others go on from this one.
    """
    result: Any = None
    problem = None
    try:
        result = read()
    except CheckpointError as error:
        problem = error
    if any_process(problem is not None):
        raise problem or CheckpointError("another process cannot read it")
    return result


def _check_same_arrays(where: Any, saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    if dict(saved) == dict(wanted):
        return
    lines = [
        f"  {name}: the checkpoint has {saved.get(name, 'nothing')}, the configuration asks for "
        f"{wanted.get(name, 'nothing')}"
        for name in sorted({*saved, *wanted}, key=lambda name: (not name.startswith("params."), name))
        if saved.get(name) != wanted.get(name)
    ]
    more = f"\n  and {len(lines) - 8} more" if len(lines) > 8 else ""
    other = "model" if any(line.startswith("  params.") for line in lines) else "optimizer"
    raise UserError(
        f"{where} is a checkpoint of another {other}:\n" + "\n".join(lines[:8]) + more + "\n"
        "Use the configuration that it was trained with, or start from its weights alone by trainer.initialize_from, "
        "in a run with a trainer.id of its own"
    )
