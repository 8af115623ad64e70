"""A checkpoint directory on disk or in a bucket, with background saves, verified reads and deletion by policy."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import jax

from lm_trainer.checkpoint.digest import compute_checksums
from lm_trainer.checkpoint.in_bucket import BucketSteps
from lm_trainer.checkpoint.in_memory import Base, MemoryCopies
from lm_trainer.checkpoint.on_disk import DiskSteps
from lm_trainer.checkpoint.pins import pinned_steps
from lm_trainer.checkpoint.policy import CheckpointerConfig, is_permanent
from lm_trainer.checkpoint.record import FORMAT, CheckpointError, describe_arrays, root_cause
from lm_trainer.checkpoint.steps import DirectoryLock, NoLock, Steps, move_damaged_aside
from lm_trainer.core.bucket import Bucket, StoragePath
from lm_trainer.core.checksummed import CHECKSUM, with_checksum
from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.parallel.processes import any_process, gather_texts, is_lead, wait_for_all

__all__ = [
    "PERMANENT_KEY",
    "CheckpointError",
    "CheckpointStore",
    "Restored",
    "list_steps",
    "read_record",
    "read_step",
    "root_cause",
]

logger = logging.getLogger(__name__)
PERMANENT_KEY = "kept"
"""Key of a record. The value is True if the checkpoint was saved as permanent, either by the policy or at the request
of a user. Records of older versions do not contain the key."""

Arrays = dict[str, jax.Array]
T = TypeVar("T")


class Restored(NamedTuple):
    """Content of a checkpoint."""

    step: int
    arrays: Arrays
    record: dict[str, Any]
    """The JSON record that was saved with the arrays."""


class CheckpointStore:
    """Saves and restores flat dicts of arrays.

    A step is either complete or does not exist, even while it is being written or deleted: on disk, a rename commits
        it, and in a bucket, one object that is written last. Neither Orbax nor TensorStore verifies array data, so a
        checksum of every array is stored with the step and compared after reading.

    Args:
        directory: directory with the checkpoints of one run.
        config: the policy for saving and keeping checkpoints.
        lock: lock of the directory against other processes; None if no other process uses it.

    Attributes:
        extra_permanent: steps of the permanent checkpoints that were found at the start and that `config.keep` does not
            cover.
    """

    def __init__(self, directory: StoragePath, config: CheckpointerConfig, lock: DirectoryLock | None = None):
        self._steps = _open_steps(directory, config)
        self.directory = self._steps.directory
        self._config = config
        self._saved_at = time.monotonic()
        self._saving: Future[Any] | None = None
        self._copies = None if config.memory is None else MemoryCopies(config.memory, str(self.directory))
        self._begun: Base | None = None
        self._committed: Base | None = None
        self._restored: Restored | None = None
        self._lock = lock or NoLock()
        self._writer = self._steps.open_writer(self._all_damaged_error, self._lock)
        earlier = self.steps()
        # Reads only the records of steps that the policy does not cover. A checkpoint without the key is kept.
        self.extra_permanent = [
            s
            for s in earlier
            if not is_permanent(s, config.keep) and self._read_record_or_empty(s).get(PERMANENT_KEY, True)
        ]
        self._stay = {*self.extra_permanent, *(() if config.delete_old_temp_checkpoints else earlier)}

    def steps(self) -> list[int]:
        """Lists the committed steps in ascending order."""
        return self._steps.list_steps()

    def read_record(self, step: int) -> dict[str, Any]:
        """Returns the JSON record of a step, or an empty dict if it is missing or unreadable."""
        if self._restored is not None and self._restored.step == step:
            return self._restored.record
        return self._read_record_or_empty(step) if step in self.steps() else {}

    def _read_record_or_empty(self, step: int) -> dict[str, Any]:
        try:
            return self._steps.read_record(step)
        except CheckpointError:
            return {}

    def extra_permanent_note(self) -> str | None:
        """Returns a note about permanent checkpoints that the policy does not cover; None if it covers all of them."""
        if not self.extra_permanent:
            return None
        steps = f"{', '.join(map(str, self.extra_permanent[:8]))}{' ...' if len(self.extra_permanent) > 8 else ''}"
        return (
            f"trainer.checkpointer.keep does not ask for the checkpoints of steps {steps}, which were permanent when "
            f"they were saved and stay; {self._writer.how_to_remove(self.extra_permanent[0])}"
        )

    def is_due(self, step: int) -> bool:
        """Returns True if either policy requires a checkpoint after `step` steps."""
        return self.is_permanent(step) or self.is_overdue()

    def is_permanent(self, step: int) -> bool:
        """Returns True if the policy by step requires a checkpoint after `step` steps."""
        return is_permanent(step, self._config.keep)

    def is_overdue(self) -> bool:
        """Returns True if the policy by time requires a checkpoint now."""
        return time.monotonic() - self._saved_at >= self._config.save_interval.total_seconds()

    def save(self, step: int, arrays: Arrays, record: Mapping[str, Any]) -> None:
        """Waits for the previous save, copies the arrays off the devices, and writes them in the background.

        The checkpoint is permanent if the current policy or PERMANENT_KEY in `record` requires it, and remains
        permanent if the policy changes later.

        Raises:
            MachineError: if this or the previous save failed, for example because of a full disk.
        """
        # The previous checkpoint must be known to be complete before older ones are deleted.
        self.wait()
        self._delete_temporary()
        permanent = is_permanent(step, self._config.keep) or record.get(PERMANENT_KEY, False)
        if permanent:
            self._stay.add(step)
        meta = with_checksum({**_describe_state(step, arrays), **record, PERMANENT_KEY: permanent})
        self._begun = Base(step, meta[CHECKSUM])
        try:
            self._saving = self._writer.save(step, arrays, meta)
        except Exception as error:
            raise self._discard_failed_save(error) from error
        self._saved_at = time.monotonic()

    def is_copy_due(self, step: int) -> bool:
        """Returns True if a copy of the state in memory is due after `step` steps."""
        return self._copies is not None and self._copies.is_due(step)

    def save_copy(self, step: int, arrays: Arrays, record: Mapping[str, Any]) -> None:
        """Copies the arrays off the devices, and keeps them in the memory of the machines (`checkpointer.memory`).

        There is no copy before the first checkpoint of the run is complete.

        Raises:
            MachineError: as for `check_for_errors`.
        """
        assert self._copies is not None
        self.check_for_errors()
        self._copies.save(step, arrays, with_checksum({**_describe_state(step, arrays), **record}), self._committed)

    def check_for_errors(self) -> None:
        """Raises `MachineError` if the save in progress has failed, or another process has taken over the directory.

        The check is cheap and does not block.
        """
        self._lock.check_lock_held()
        if self._saving is not None and self._saving.done():
            self.wait()

    def start_grace_period(self) -> None:
        """Limits current and future saves to a bucket to the grace period.

        A save either completes or leaves no step.
        """
        self._writer.limit_save_time(self._config.grace_period.total_seconds())

    def wait(self) -> None:
        """Waits until the last save is complete.

        Raises:
            MachineError: if the save failed.
        """
        # A save holds a thread and three open files until its result is retrieved.
        saving, self._saving = self._saving, None
        try:
            if saving is not None:
                saving.result()
            self._writer.wait()
        except Exception as error:
            raise self._discard_failed_save(error) from error
        self._committed = self._begun

    def close(self) -> None:
        """Waits for the last save and releases the directory."""
        self.wait()
        self._delete_temporary()
        if self._copies is not None:
            self._copies.close(None if self._committed is None else self._committed.step)
        self._writer.close()

    def restore(
        self, like: Mapping[str, jax.ShapeDtypeStruct], step: int | None = None, *, partial: bool = False
    ) -> Restored | None:
        """Reads the newest intact checkpoint, or a newer copy in memory. Returns None if there are no checkpoints.

        Damaged checkpoints are logged and moved aside, and the next older one is tried. If no checkpoint can be used,
        all of them are left in place.

        Args:
            like: shape, dtype and sharding of every array, by name.
            step: step of the checkpoint to read; None means the newest intact one.
            partial: leave out arrays that are missing in the checkpoint, instead of raising an error.

        Raises:
            UserError: if the checkpoint is from another model, or the requested step does not exist.
            MachineError: if checkpoints exist, but none can be used.
        """
        steps = self.steps()
        if step is not None and step not in steps:
            raise UserError(f"{self.directory}: there is no checkpoint of step {step} (there are: {steps or 'none'})")
        if step is None and steps and (copy := self._restore_copy(like, steps[-1])) is not None:
            return copy
        bad: dict[int, CheckpointError] = {}
        for candidate in [step] if step is not None else reversed(steps):
            try:
                restored = read_step(self.directory, candidate, like, partial=partial)
            except CheckpointError as error:
                bad[candidate] = error
            else:
                self._move_damaged_aside(bad)
                checksum = restored.record.get(CHECKSUM)
                self._begun = self._committed = None if checksum is None else Base(candidate, checksum)
                return restored
        if bad:
            raise self._all_damaged_error(bad)
        return None

    def _restore_copy(self, like: Mapping[str, jax.ShapeDtypeStruct], newest: int) -> Restored | None:
        if self._copies is None:
            return None
        copy = self._copies.restore(
            like, newest, lambda base: self.read_record(base.step).get(CHECKSUM) == base.checksum
        )
        if copy is None:
            return None
        logger.info("the state of step %s is from memory; the newest checkpoint is of step %s", copy.step, newest)
        self._begun = self._committed = copy.base
        self._restored = Restored(copy.step, copy.arrays, copy.record)
        return self._restored

    def _move_damaged_aside(self, bad: Mapping[int, CheckpointError]) -> None:
        if bad:
            move_damaged_aside(self._writer, bad)
            self._writer.refresh()

    def _all_damaged_error(self, bad: Mapping[int, CheckpointError]) -> MachineError:
        return MachineError(
            f"{self.directory}: no checkpoint can be used, and nothing was changed:\n"
            + "".join(f"  step {step}: {error}\n" for step, error in bad.items())
            + "Mend the disk or put back a copy; to start from the beginning, remove the directory or set trainer.id"
        )

    def _delete_temporary(self) -> None:
        """Deletes all temporary checkpoints except the newest one and those that branches need."""
        old = [
            s for s in self._writer.known_steps()[:-1] if not is_permanent(s, self._config.keep) and s not in self._stay
        ]
        # Every process must have listed the steps before the first step is deleted.
        wait_for_all("old checkpoints are known")
        self._writer.delete(self._without_pinned(old) if old else old)

    def _without_pinned(self, steps: list[int]) -> list[int]:
        """Returns the steps that no branch needs, or no steps if that is unknown."""
        # A branch may begin at any time, so all processes must know what the first one sees now.
        pinned = pinned_steps(self.directory) if is_lead() else None
        pinned = json.loads(gather_texts(json.dumps(None if pinned is None else sorted(pinned)))[0])
        return [] if pinned is None else [step for step in steps if step not in pinned]

    def _discard_failed_save(self, error: Exception) -> MachineError:
        self._writer.discard_unfinished()
        present = self._writer.known_steps()
        saved = f"The checkpoints of steps {present} are untouched" if present else "There are no other checkpoints"
        return MachineError(
            f"{self.directory}: a checkpoint could not be written: {root_cause(error)}. "
            f"{saved}; {self._writer.remedy} and start again"
        )


def _describe_state(step: int, arrays: Arrays) -> dict[str, Any]:
    """Returns the fields of the record of a state that its arrays determine."""
    digests, shapes = compute_checksums(arrays), describe_arrays(arrays)
    return {"format": FORMAT, "step": step, "digests": digests, "shapes": shapes}


def _open_steps(directory: StoragePath, config: CheckpointerConfig | None = None) -> Steps:
    return BucketSteps(directory, config) if isinstance(directory, Bucket) else DiskSteps(directory, config)


def list_steps(directory: StoragePath) -> list[int]:
    """Lists the steps in a checkpoint directory in ascending order.

    The list is empty if the directory does not exist.
    """
    return _open_steps(directory).list_steps()


def read_record(directory: StoragePath, step: int) -> dict[str, Any]:
    """Reads the JSON record that was saved with a step.

    Raises:
        CheckpointError: if the record is missing or damaged.
    """
    return _open_steps(directory).read_record(step)


def read_step(
    directory: StoragePath,
    step: int,
    like: Mapping[str, jax.ShapeDtypeStruct],
    *,
    selects: Callable[[str], bool] = lambda _: True,
    partial: bool = False,
) -> Restored:
    """Reads and verifies one step. All processes must call this function, which succeeds in all of them or in none.

    Args:
        directory: the checkpoint directory.
        step: the step to read.
        like: shape, dtype and sharding of the arrays to read.
        selects: only arrays for whose name it returns True must match `like`. Other arrays are not read.
        partial: leave out arrays that are missing in the checkpoint, instead of raising an error.

    Raises:
        CheckpointError: if the checkpoint is damaged.
        UserError: if the checkpoint is intact, but its arrays do not match `like`.
    """
    steps = _open_steps(directory)
    record = _read_in_all_processes(lambda: steps.read_record(step))
    saved = {name: shape for name, shape in record["shapes"].items() if selects(name)}
    if partial:
        like = {name: x for name, x in like.items() if name in saved}
    _check_same_arrays(directory / str(step), saved, describe_arrays(like))
    arrays = _read_in_all_processes(lambda: steps.read_arrays(step, record, like))
    actual = compute_checksums(arrays)
    bad = [name for name in arrays if actual[name] != record["digests"][name]]
    if bad:
        raise CheckpointError(f"the checksum differs for {', '.join(bad[:3])}{' ...' if len(bad) > 3 else ''}")
    return Restored(step, arrays, record)


def _read_in_all_processes(read: Callable[[], T]) -> T:
    """Returns the result of `read`. If `read` fails in one process, raises `CheckpointError` in all of them.

    Without this, some processes would fall back to an older checkpoint while the others continue from this one.
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


def _check_same_arrays(path: Any, saved: Mapping[str, str], expected: Mapping[str, str]) -> None:
    if dict(saved) == dict(expected):
        return
    lines = [
        f"  {name}: the checkpoint has {saved.get(name, 'nothing')}, the configuration asks for "
        f"{expected.get(name, 'nothing')}"
        for name in sorted({*saved, *expected}, key=lambda name: (not name.startswith("params."), name))
        if saved.get(name) != expected.get(name)
    ]
    more = f"\n  and {len(lines) - 8} more" if len(lines) > 8 else ""
    other = "model" if any(line.startswith("  params.") for line in lines) else "optimizer"
    raise UserError(
        f"{path} is a checkpoint of another {other}:\n" + "\n".join(lines[:8]) + more + "\n"
        "Use the configuration that it was trained with, or start from its weights alone by trainer.initialize_from, "
        "in a run with a trainer.id of its own"
    )
