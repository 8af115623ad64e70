"""A directory of checkpoints on disk: saved asynchronously, verified when read, deleted by renaming first."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import re
import shutil
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
from orbax.checkpoint import v1 as ocp

from lm_trainer.checkpoint.digest import digests
from lm_trainer.checkpoint.policy import CheckpointerConfig, is_permanent
from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.files import make_writable
from lm_trainer.parallel.processes import any_process, is_lead, wait_for_all

logger = logging.getLogger(__name__)
KEPT = "kept"
"""Key of a record that makes its checkpoint permanent, whatever the policy says."""
_TRASH = ".trash-"
_CORRUPT = ".corrupt"
FORMAT = 2
# Checkpoints of the first format have no checksum of their metadata, and are still read.
_FORMAT_WITHOUT_CHECKSUM = 1
_LONGEST = 300
"""Characters of an error that a message quotes."""

Arrays = dict[str, jax.Array]
T = TypeVar("T")


class Restored(NamedTuple):
    """Content of a checkpoint."""

    step: int
    arrays: Arrays
    record: dict[str, Any]
    """The JSON that was saved with it."""


class CheckpointError(Exception):
    """A checkpoint that cannot be trusted: incomplete, unreadable, or not what was written."""


class CheckpointStore:
    """Saves and restores flat dicts of arrays.

    A step is written beside the others and appears by a rename, so it is complete or does not exist. Orbax verifies no
    array data, so a checksum of every array is stored with the step and compared after reading.
    """

    def __init__(self, directory: Path, config: CheckpointerConfig):
        self.directory = directory.absolute()
        self._config = config
        self._saved_at = time.monotonic()
        self._saving: Any = None
        # One thread deletes old checkpoints: on a network file system that can take longer than a step.
        self._trash = ThreadPoolExecutor(1, "trash")
        # Orbax prints the traceback of each of its threads, and then raises the error, which is reported here once.
        logging.getLogger("absl").addFilter(_is_no_traceback)
        if is_lead():
            make_writable(self.directory, "trainer.checkpointer.base_path")
            # What an attempt that was killed did not get round to deleting.
            for trash in self.directory.glob(f"{_TRASH}*"):
                shutil.rmtree(trash, ignore_errors=True)
        wait_for_all("checkpoint directory")
        self._reopen(cleanup=True)
        # Those of the policy need no record, so few are read.
        temporary = (step for step in self.steps() if not is_permanent(step, config.keep))
        self._kept = {step for step in temporary if self.record(step).get(KEPT)}
        self._earlier = set() if config.delete_old_temp_checkpoints else set(self.steps())

    def steps(self) -> list[int]:
        """Steps that are committed, in order."""
        return committed_steps(self.directory)

    def record(self, step: int) -> dict[str, Any]:
        """The JSON that was saved with a step; empty when there is none that can be read."""
        try:
            return read_record(self.directory, step) if step in self.steps() else {}
        except CheckpointError:
            return {}

    def due(self, step: int) -> bool:
        """Returns True if a policy asks for a checkpoint after `step` steps."""
        elapsed = time.monotonic() - self._saved_at
        return is_permanent(step, self._config.keep) or elapsed >= self._config.save_interval.total_seconds()

    def save(self, step: int, arrays: Arrays, record: Mapping[str, Any]) -> None:
        """Copies the arrays off the devices and writes them in the background, after the save before it is done.

        Raises:
            MachineError: when this or the previous save failed, for a full disk for example.
        """
        # Only a save that is known to be on disk may replace the one before it.
        self.wait()
        self._delete_temporary()
        if record.get(KEPT):
            self._kept.add(step)
        meta = {"format": FORMAT, "step": step, "digests": digests(arrays), "shapes": describe(arrays), **record}
        meta["checksum"] = _checksum(meta)
        try:
            self._saving = self._orbax.save_checkpointables_async(
                step, {"state": arrays}, force=True, custom_metadata=meta
            )
        except Exception as error:
            raise self._save_failed(error) from error
        self._saved_at = time.monotonic()

    def wait(self) -> None:
        """Waits until the last save is on disk.

        Raises:
            MachineError: when it failed.
        """
        # A save has a thread and three open files of its own until it is asked for its result.
        saving, self._saving = self._saving, None
        try:
            if saving is not None:
                saving.result()
            self._orbax.wait()
        except Exception as error:
            raise self._save_failed(error) from error

    def close(self) -> None:
        """Waits and releases the directory."""
        self.wait()
        self._delete_temporary()
        self._trash.shutdown()
        self._orbax.close()

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
            self._rename(bad)
            self._reload()

    def _rename(self, bad: Mapping[int, CheckpointError]) -> None:
        # No process may still read a directory while process 0 renames it, nor list it before that is done.
        wait_for_all("bad checkpoints are known")
        for step, why in bad.items():
            target = next(
                path
                for n in itertools.count()
                if not (path := self.directory / f"{step}{_CORRUPT}{f'.{n}' if n else ''}").exists()
            )
            if is_lead():
                (self.directory / str(step)).rename(target)
            logger.error("checkpoint %s cannot be used: %s; moved to %s", step, why, target)
        wait_for_all("bad checkpoints are moved")

    def _none_usable(self, bad: Mapping[int, CheckpointError]) -> MachineError:
        return MachineError(
            f"{self.directory}: no checkpoint can be used, and nothing was changed:\n"
            + "".join(f"  step {step}: {why}\n" for step, why in bad.items())
            + "Mend the disk or put back a copy; to start from the beginning, remove the directory or set trainer.id"
        )

    def _delete_temporary(self) -> None:
        """Deletes every temporary checkpoint but the newest.

        By rename first: a kill in the middle of a deletion must not leave half a step that looks like a whole one. The
        renamed directory is removed in the background, or at the next start.
        """
        stay = self._earlier | self._kept
        old = [s for s in self.steps()[:-1] if not is_permanent(s, self._config.keep) and s not in stay]
        # Every process has to list the steps before the first of them is renamed.
        wait_for_all("old checkpoints are known")
        for step in old if is_lead() else ():
            trash = self.directory / f"{_TRASH}{step}"
            (self.directory / str(step)).rename(trash)
            self._trash.submit(shutil.rmtree, trash, ignore_errors=True)
        wait_for_all("old checkpoints are gone")
        if old:
            self._reload()

    def _reopen(self, *, cleanup: bool = False) -> None:
        """Opens the directory with Orbax, after moving checkpoints with damaged metadata aside.

        Orbax reads the metadata of every step when it opens, so that a single damaged one, however old, would keep all
        others from being read and written.
        """
        try:
            self._orbax = _open(self.directory, cleanup=cleanup)
        except Exception as error:
            bad: dict[int, CheckpointError] = {}
            for step in self.steps():
                try:
                    read_record(self.directory, step)
                except CheckpointError as problem:
                    bad[step] = problem
            if len(bad) == len(self.steps()):
                raise self._none_usable(bad) from error
            self._rename(bad)
            self._orbax = _open(self.directory, cleanup=cleanup)

    def _reload(self) -> None:
        """Tells Orbax, which remembers the steps that it has seen, that some have gone."""
        try:
            self._orbax.reload()
        except Exception:  # of any kind: it reads all metadata again, and one of them may be damaged by now
            self._orbax.close()
            self._reopen()

    def _save_failed(self, error: Exception) -> MachineError:
        # The unfinished copy would take the room that the next attempt needs.
        for left in self.directory.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(left, ignore_errors=True)
        return MachineError(
            f"{self.directory}: a checkpoint could not be written: {root_cause(error)}. "
            f"The checkpoints of steps {self.steps()} are untouched; make room or mend the disk and start again"
        )


def committed_steps(directory: Path) -> list[int]:
    """Lists the steps of a checkpoint directory in order; empty when it does not exist."""
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if re.fullmatch(r"\d+", p.name) and p.is_dir())


def read_record(directory: Path, step: int) -> dict[str, Any]:
    """Reads the JSON that was saved with a step.

    Raises:
        CheckpointError: when it is missing or damaged.
    """
    try:
        meta = ocp.checkpointables_metadata(str(directory.absolute() / str(step))).custom_metadata
    except Exception as error:  # Orbax raises whatever its many readers do
        raise CheckpointError(f"its metadata cannot be read ({root_cause(error)})") from error
    if not isinstance(meta, dict) or "digests" not in meta:
        raise CheckpointError("its metadata is missing")
    if meta.get("format") != _FORMAT_WITHOUT_CHECKSUM and meta.get("checksum") != _checksum(meta):
        raise CheckpointError("the checksum of its metadata differs")
    return meta


def _checksum(record: Mapping[str, Any]) -> int:
    """CRC-32 of everything else in the JSON that is saved with a step."""
    others = {name: value for name, value in record.items() if name != "checksum"}
    return zlib.crc32(json.dumps(others, sort_keys=True).encode())


def read_step(
    directory: Path,
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
    record = _together(lambda: read_record(directory, step))
    saved = {k: v for k, v in record["shapes"].items() if k.startswith(prefix)}
    if partial:
        like = {name: x for name, x in like.items() if name in saved}
    _check_same_arrays(directory / str(step), saved, describe(like))
    # A placeholder tells Orbax to leave an array on the disk.
    wanted = {name: like.get(name, ocp.PLACEHOLDER) for name in record["shapes"]}
    loaded = _together(lambda: _read_arrays(directory.absolute() / str(step), wanted))
    arrays = {name: loaded[name] for name in like}
    found = digests(arrays)
    wrong = [name for name in arrays if found[name] != record["digests"][name]]
    if wrong:
        raise CheckpointError(f"the checksum differs for {', '.join(wrong[:3])}{' ...' if len(wrong) > 3 else ''}")
    return Restored(step, arrays, record)


def _read_arrays(path: Path, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return ocp.load_checkpointables(str(path), {"state": dict(wanted)})["state"]
    except Exception as error:
        raise CheckpointError(f"its arrays cannot be read ({root_cause(error)})") from error


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


def describe(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Describes dtype and shape of each array, as `float32[12,64]`."""
    return {name: f"{x.dtype}[{','.join(map(str, x.shape))}]" for name, x in arrays.items()}


def _check_same_arrays(where: Path, saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
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
        "Use the configuration that it was trained with, or set trainer.id to start another run, from these weights by "
        "trainer.initialize_from if they are to stay"
    )


def root_cause(error: BaseException) -> str:
    """Finds the innermost message of a chain of exceptions: Orbax wraps the reason in misleading ones."""
    seen: set[BaseException] = {error}
    # A thread that raises the error of another once more can close the chain to a ring, and waiting a second time for
    # a save that failed brings up the `MachineError` of the first time.
    while (inner := error.__cause__ or error.__context__) is not None:
        if inner in seen or isinstance(inner, MachineError):
            break
        seen.add(inner)
        error = inner
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "no space left on device"
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    # TensorStore names the file first and the fault last, so the middle can go.
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


def _is_no_traceback(record: logging.LogRecord) -> bool:
    return not record.exc_info


def _open(directory: Path, *, cleanup: bool) -> Any:
    context = ocp.Context()
    # Compressed, a save of 378 MB took 5.4 s instead of 0.7 s, and came out only 8 % smaller.
    context.array.saving.use_compression = False
    return ocp.training.Checkpointer(
        str(directory),
        context=context,
        # `CheckpointStore` deletes by its own policy, by renaming first.
        preservation_policy=ocp.training.preservation_policies.PreserveAll(),  # pyright: ignore[reportArgumentType]
        cleanup_tmp_directories=cleanup,
    )
