"""Steps in a directory of this machine, written by Orbax: each appears by a rename, and goes by one."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from lm_trainer.checkpoint.event_loops import keep_loops_patient, patient_loops
from lm_trainer.checkpoint.record import CheckpointError, checked, root_cause
from lm_trainer.checkpoint.steps import Holder, NoneUsable, set_aside
from lm_trainer.core.errors import MachineError
from lm_trainer.core.files import make_writable
from lm_trainer.parallel.processes import is_lead, wait_for_all

_TRASH = ".trash-"
_CORRUPT = ".corrupt"
_PASSING = (
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN),
)
"""Errors of the machine or of a mount, which say nothing about the files."""
_NO_TIMEOUT = 100 * 365 * 86400
"""Seconds; for Orbax, which needs some."""


class DiskSteps:
    """Reader of the steps of a local checkpoint directory; see `lm_trainer.checkpoint.steps.Steps`."""

    def __init__(self, directory: Path):
        self.directory = directory.absolute()
        logging.getLogger("absl").addFilter(_is_told_by_orbax_alone)

    def committed(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        return sorted(int(p.name) for p in self.directory.iterdir() if re.fullmatch(r"\d+", p.name) and p.is_dir())

    def record(self, step: int) -> dict[str, Any]:
        try:
            with patient_loops():
                meta = ocp.checkpointables_metadata(str(self.directory / str(step))).custom_metadata
        except Exception as error:  # Orbax raises whatever its many readers do
            raise self._unreadable(step, "metadata", error) from error
        return checked(meta)

    def arrays(
        self, step: int, record: Mapping[str, Any], like: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.Array]:
        # A placeholder tells Orbax to leave an array on the disk.
        wanted = {name: like.get(name, ocp.PLACEHOLDER) for name in record["shapes"]}
        try:
            with patient_loops():
                loaded = ocp.load_checkpointables(str(self.directory / str(step)), {"state": wanted})["state"]
        except Exception as error:
            raise self._unreadable(step, "arrays", error) from error
        return {name: loaded[name] for name in like}

    def _unreadable(self, step: int, what: str, error: Exception) -> Exception:
        """The error of a step that is damaged, or of a machine that cannot read it at this time: it may be whole."""
        cause = root_cause(error)
        if any(os.strerror(code) in cause for code in _PASSING):
            return MachineError(
                f"{self.directory / str(step)}: its {what} cannot be read now ({cause}), and nothing was changed; mend "
                f"that, then start the same command again"
            )
        return CheckpointError(f"its {what} cannot be read ({cause})")

    def writer(self, none_usable: NoneUsable, holder: Holder) -> DiskWriter:
        del holder  # the lock of the run directory lasts as long as the process
        return DiskWriter(self, none_usable)


class DiskWriter:
    """Writer of such steps; see `lm_trainer.checkpoint.steps.Writer`."""

    remedy = "make room or mend the disk"

    def __init__(self, steps: DiskSteps, none_usable: NoneUsable):
        self._steps, self._none_usable = steps, none_usable
        self.directory = steps.directory
        # One thread deletes old checkpoints: on a network file system that can take longer than a step.
        self._trash = ThreadPoolExecutor(1, "trash")
        self._results = ThreadPoolExecutor(1, "save")
        if is_lead():
            make_writable(self.directory, "trainer.checkpointer.base_path")
            # What an attempt that was killed did not get round to deleting.
            for trash in self.directory.glob(f"{_TRASH}*"):
                shutil.rmtree(trash, ignore_errors=True)
        wait_for_all("checkpoint directory")
        self._opened = self.directory.stat()
        # A save that fails leaves tasks in the loop of its thread, as a read does.
        keep_loops_patient()
        self._reopen(cleanup=True)

    def how_to_remove(self, step: int) -> str:
        return f"to remove one: rm -r {self.directory / str(step)}"

    def save(self, step: int, arrays: Mapping[str, jax.Array], record: Mapping[str, Any]) -> Future[Any]:
        # Orbax would make it again, where the checkpoints so far are not.
        if not self.directory.is_dir() or not os.path.samestat(self._opened, self.directory.stat()):
            raise MachineError("the directory was removed or replaced since the run has it; put it back if you can")
        response = self._orbax.save_checkpointables_async(
            step, {"state": dict(arrays)}, force=True, custom_metadata=dict(record)
        )
        # Orbax can be waited for, and not asked.
        return self._results.submit(response.result)

    def wait(self) -> None:
        self._orbax.wait()

    def present(self) -> list[int]:
        return self._steps.committed()

    def hurry(self, seconds: float) -> None:
        """Nothing: a disk is not asked again."""

    def discard_unfinished(self) -> None:
        # The unfinished copy would take the room that the next attempt needs.
        for left in self.directory.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(left, ignore_errors=True)

    def delete(self, steps: list[int]) -> None:
        # By rename first: a kill in the middle of a deletion must not leave half a step that looks like a whole one.
        # The renamed directory is removed in the background, or at the next start.
        for step in steps if is_lead() else ():
            trash = self.directory / f"{_TRASH}{step}"
            (self.directory / str(step)).rename(trash)
            self._trash.submit(shutil.rmtree, trash, ignore_errors=True)
        wait_for_all("old checkpoints are gone")
        if steps:
            self._reload()

    def move_aside(self, step: int) -> str:
        target = next(
            path
            for n in itertools.count()
            if not (path := self.directory / f"{step}{_CORRUPT}{f'.{n}' if n else ''}").exists()
        )
        if is_lead():
            (self.directory / str(step)).rename(target)
        return str(target)

    def moved(self) -> None:
        self._reload()

    def close(self) -> None:
        self._trash.shutdown()
        self._results.shutdown()
        self._orbax.close()

    def _reopen(self, *, cleanup: bool = False) -> None:
        """Opens the directory with Orbax, after moving checkpoints with damaged metadata aside.

        Orbax reads the metadata of every step when it opens, so that a single damaged one, however old, would keep all
        others from being read and written.
        """
        try:
            # The metadata of damaged steps fail as their arrays do.
            with patient_loops():
                self._orbax = _open(self.directory, cleanup=cleanup)
        except Exception as error:
            bad: dict[int, CheckpointError] = {}
            steps = self._steps.committed()
            for step in steps:
                try:
                    self._steps.record(step)
                except CheckpointError as problem:
                    bad[step] = problem
            if len(bad) == len(steps):
                raise self._none_usable(bad) from error
            set_aside(self, bad)
            self._orbax = _open(self.directory, cleanup=cleanup)

    def _reload(self) -> None:
        """Tells Orbax, which remembers the steps that it has seen, that some have gone."""
        try:
            with patient_loops():
                self._orbax.reload()
        except Exception:  # of any kind: it reads all metadata again, and one of them may be damaged by now
            self._orbax.close()
            self._reopen()


def _is_told_by_orbax_alone(record: logging.LogRecord) -> bool:
    # Orbax prints the traceback of each of its threads, and then raises the error, which is reported here once. What it
    # cannot read of the metadata of arrays is found again when these are read.
    return not record.exc_info and "Failed to get metadata for checkpointable" not in record.getMessage()


def _open(directory: Path, *, cleanup: bool) -> Any:
    context = ocp.Context()
    # Compressed, a save of 378 MB took 5.4 s instead of 0.7 s, and came out only 8 % smaller.
    context.array.saving.use_compression = False
    # Orbax measures its timeouts by the clock of the day: one that is set, or a machine that sleeps, would end a save.
    # That for directories which a thread makes cannot be chosen. The watchdog tells of a save that hangs.
    context.asynchronous.timeout_secs = _NO_TIMEOUT
    context.asynchronous.create_directories_asynchronously = False
    return ocp.training.Checkpointer(
        str(directory),
        context=context,
        # `CheckpointStore` deletes by its own policy, by renaming first.
        preservation_policy=ocp.training.preservation_policies.PreserveAll(),  # pyright: ignore[reportArgumentType]
        cleanup_tmp_directories=cleanup,
    )
