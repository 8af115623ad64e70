"""Checkpoint steps in a local directory, written by Orbax. Renaming a directory commits a step, or removes it."""

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

from lm_trainer.checkpoint.event_loops import always_drain_event_loops_on_close, drain_event_loops_on_close
from lm_trainer.checkpoint.host_memory import local_bytes
from lm_trainer.checkpoint.policy import CheckpointerConfig
from lm_trainer.checkpoint.record import CheckpointError, root_cause, verify_record
from lm_trainer.checkpoint.steps import AllDamaged, DirectoryLock, move_damaged_aside
from lm_trainer.core.errors import MachineError
from lm_trainer.core.files import ensure_writable_directory
from lm_trainer.parallel.processes import is_lead, wait_for_all

_TRASH = ".trash-"
_CORRUPT = ".corrupt"
_TRANSIENT = (
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN),
)
"""Transient errors of the machine or of a mount, which say nothing about the content of the files."""
_NO_TIMEOUT = 100 * 365 * 86400
"""Timeout in seconds that is effectively infinite. Orbax does not allow operations without a timeout."""


class DiskSteps:
    """Reader of the steps of a local checkpoint directory; see `lm_trainer.checkpoint.steps.Steps`."""

    def __init__(self, directory: Path, config: CheckpointerConfig | None = None):
        self.directory = directory.absolute()
        self.host_bytes = None if config is None else config.host_bytes
        logging.getLogger("absl").addFilter(_is_worth_logging)

    def list_steps(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        return sorted(int(p.name) for p in self.directory.iterdir() if re.fullmatch(r"\d+", p.name) and p.is_dir())

    def read_record(self, step: int) -> dict[str, Any]:
        from orbax.checkpoint import v1 as ocp

        try:
            with drain_event_loops_on_close():
                meta = ocp.checkpointables_metadata(str(self.directory / str(step))).custom_metadata
        except Exception as error:  # Orbax passes on errors of its readers, of any class
            raise self._unreadable_error(step, "metadata", error) from error
        return verify_record(meta)

    def read_arrays(
        self, step: int, record: Mapping[str, Any], like: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.Array]:
        from orbax.checkpoint import v1 as ocp

        # Orbax skips arrays whose target is a placeholder.
        targets = {name: like.get(name, ocp.PLACEHOLDER) for name in record["shapes"]}
        try:
            with drain_event_loops_on_close():
                loaded = ocp.load_checkpointables(str(self.directory / str(step)), {"state": targets})["state"]
        except Exception as error:
            raise self._unreadable_error(step, "arrays", error) from error
        return {name: loaded[name] for name in like}

    def _unreadable_error(self, step: int, part: str, error: Exception) -> Exception:
        """Returns the error for a step that cannot be read.

        Returns:
            `CheckpointError` for a damaged step, or `MachineError` if the step may be intact but cannot be read now.
        """
        cause = root_cause(error)
        if any(os.strerror(code) in cause for code in _TRANSIENT):
            return MachineError(
                f"{self.directory / str(step)}: its {part} cannot be read now ({cause}), and nothing was changed; mend "
                f"that, then start the same command again"
            )
        return CheckpointError(f"its {part} cannot be read ({cause})")

    def open_writer(self, all_damaged: AllDamaged, lock: DirectoryLock) -> DiskWriter:
        del lock  # this process holds the lock of the run directory until it ends
        return DiskWriter(self, all_damaged)


class DiskWriter:
    """Writer of steps in a local checkpoint directory; see `lm_trainer.checkpoint.steps.Writer`."""

    remedy = "make room or mend the disk"

    def __init__(self, steps: DiskSteps, all_damaged: AllDamaged):
        self._steps, self._all_damaged = steps, all_damaged
        self.directory = steps.directory
        # Old checkpoints are deleted in a thread, because on a network file system this can take longer than a training
        # step.
        self._trash = ThreadPoolExecutor(1, "trash")
        self._results = ThreadPoolExecutor(1, "save")
        self._transfer_bytes: int | None = None
        if is_lead():
            ensure_writable_directory(self.directory, "trainer.checkpointer.base_path")
            # Completes deletions that a killed attempt has left unfinished.
            for trash in self.directory.glob(f"{_TRASH}*"):
                _remove_step(trash)
        wait_for_all("checkpoint directory")
        self._opened = self.directory.stat()
        # A failed save leaves unfinished tasks in the event loop of its thread, as a failed read does.
        always_drain_event_loops_on_close()
        self._reopen(cleanup=True)

    def how_to_remove(self, step: int) -> str:
        return f"to remove one: rm -r {self.directory / str(step)}"

    def save(self, step: int, arrays: Mapping[str, jax.Array], record: Mapping[str, Any]) -> Future[Any]:
        # Orbax would create the directory a second time, without the previous checkpoints.
        if not self.directory.is_dir() or not os.path.samestat(self._opened, self.directory.stat()):
            raise MachineError("the directory was removed or replaced since the run has it; put it back if you can")
        in_parts = self._limit_transfers(local_bytes(arrays))
        response = self._orbax.save_checkpointables_async(
            step, {"state": dict(arrays)}, force=True, custom_metadata=dict(record)
        )
        # The response of Orbax can only be waited for and not polled, so a thread waits for it.
        saving = self._results.submit(response.result)
        if in_parts:
            # Orbax reads later parts from the devices after its call has returned, so they must not change until then.
            saving.exception()
        return saving

    def _limit_transfers(self, sizes: Mapping[str, int]) -> bool:
        """Makes Orbax copy arrays off the devices in parts if they exceed the limit of host memory.

        Args:
            sizes: number of bytes of each array.

        Returns:
            True if Orbax copies them in parts.
        """
        limit = self._steps.host_bytes
        if limit is None or sum(sizes.values()) <= limit:
            return False
        # Orbax copies arrays as a whole, and refuses those that are not smaller than the limit.
        transfer_bytes = max(limit, max(sizes.values()) + 1)
        if transfer_bytes != self._transfer_bytes:
            self._transfer_bytes = transfer_bytes
            self._orbax.close()
            self._reopen()
        return True

    def wait(self) -> None:
        self._orbax.wait()

    def known_steps(self) -> list[int]:
        return self._steps.list_steps()

    def limit_save_time(self, seconds: float) -> None:
        """Does nothing, because writes to a local disk are not retried."""

    def discard_unfinished(self) -> None:
        # An unfinished checkpoint takes up disk space that the next attempt needs.
        for unfinished in self.directory.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def delete(self, steps: list[int]) -> None:
        # Renames the directory first, so that a kill during the deletion does not leave a partial step that looks
        # complete. The renamed directory is removed in the background, or at the next start.
        for step in steps if is_lead() else ():
            trash = self.directory / f"{_TRASH}{step}"
            (self.directory / str(step)).rename(trash)
            self._trash.submit(_remove_step, trash)
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

    def refresh(self) -> None:
        self._reload()

    def close(self) -> None:
        self._trash.shutdown()
        self._results.shutdown()
        self._orbax.close()

    def _reopen(self, *, cleanup: bool = False) -> None:
        """Opens the directory with Orbax, and moves checkpoints with damaged metadata aside if necessary.

        Orbax reads the metadata of every step when it opens a directory, so a single damaged step, however old, would
        prevent reading and writing all others.
        """
        try:
            # Reading damaged metadata fails in the same way as reading damaged arrays.
            with drain_event_loops_on_close():
                self._orbax = _open_checkpointer(self.directory, self._transfer_bytes, cleanup=cleanup)
        except Exception as error:
            bad: dict[int, CheckpointError] = {}
            steps = self._steps.list_steps()
            for step in steps:
                try:
                    self._steps.read_record(step)
                except CheckpointError as problem:
                    bad[step] = problem
            if len(bad) == len(steps):
                raise self._all_damaged(bad) from error
            move_damaged_aside(self, bad)
            self._orbax = _open_checkpointer(self.directory, self._transfer_bytes, cleanup=cleanup)

    def _reload(self) -> None:
        """Makes Orbax refresh its cached list of steps after steps were removed."""
        try:
            with drain_event_loops_on_close():
                self._orbax.reload()
        except Exception:  # errors of any class: Orbax reads all metadata, which may be damaged by now
            self._orbax.close()
            self._reopen()


def _remove_step(path: Path) -> None:
    """Removes the directory of a step, or the link of a branch to the checkpoint of another run."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    # Orbax logs the traceback of each of its threads and then raises the error, which lm_trainer reports once.
    # Unreadable array metadata is reported when the arrays are read.
    return not record.exc_info and "Failed to get metadata for checkpointable" not in record.getMessage()


def _open_checkpointer(directory: Path, transfer_bytes: int | None, *, cleanup: bool) -> Any:
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.memory.transfer_concurrent_bytes = transfer_bytes
    # With compression, saving 378 MB took 5.4 s instead of 0.7 s, and the files were only 8 % smaller.
    context.array.saving.use_compression = False
    # Orbax measures timeouts in wall-clock time, so a clock adjustment or a suspended machine would abort a save. The
    # timeout for creating directories in a thread cannot be configured, so they are created synchronously. The watchdog
    # reports a save that hangs.
    context.asynchronous.timeout_secs = _NO_TIMEOUT
    context.asynchronous.create_directories_asynchronously = False
    return ocp.training.Checkpointer(
        str(directory),
        context=context,
        # `CheckpointStore` deletes steps according to its own policy, and renames them first.
        preservation_policy=ocp.training.preservation_policies.PreserveAll(),  # pyright: ignore[reportArgumentType]
        cleanup_tmp_directories=cleanup,
    )
