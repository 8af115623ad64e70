"""Interfaces for reading and writing the checkpoint steps of a run, on disk or in a bucket."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

import jax

from lm_trainer.checkpoint.record import CheckpointError
from lm_trainer.core.bucket import StoragePath
from lm_trainer.parallel.processes import wait_for_all

logger = logging.getLogger(__name__)

AllDamaged = Callable[[Mapping[int, CheckpointError]], Exception]
"""Function that takes the reason why each step is damaged, and returns the error that ends a run without a usable step.
"""


class DirectoryLock(Protocol):
    """Lock of the directory against other processes."""

    def check_lock_held(self) -> None:
        """Raises `MachineError` if another process has taken over the directory. Sends no request."""
        ...

    def before_commit(self, seconds: float) -> None:
        """Checks that a step may be committed in a bucket, and raises an exception if not. May be called in any thread.

        Args:
            seconds: maximum time for the check.
        """
        ...


class NoLock:
    """Lock that does nothing, for a directory that no other process uses."""

    def check_lock_held(self) -> None: ...

    def before_commit(self, seconds: float) -> None: ...


class Steps(Protocol):
    """Reader of checkpoint steps."""

    directory: Any
    """The checkpoint directory, a `StoragePath`."""

    def list_steps(self) -> list[int]:
        """Lists the complete steps in ascending order. The list is empty if the directory does not exist."""
        ...

    def read_record(self, step: int) -> dict[str, Any]:
        """Reads the JSON record of a step. Raises `CheckpointError` if it is missing or damaged."""
        ...

    def read_arrays(
        self, step: int, record: Mapping[str, Any], like: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.Array]:
        """Reads arrays of a step without verifying them. Raises `CheckpointError` if they cannot be read."""
        ...

    def open_writer(self, all_damaged: AllDamaged, lock: DirectoryLock) -> Writer:
        """Opens the directory for writing, and removes what killed attempts have left behind.

        Args:
            all_damaged: see `AllDamaged`.
            lock: lock of the directory.
        """
        ...


class Writer(Protocol):
    """Writer of checkpoint steps. All processes of a run must make the same calls."""

    @property
    def directory(self) -> StoragePath: ...

    @property
    def remedy(self) -> str:
        """Advice for the user after a failed save, as a verb phrase."""
        ...

    def how_to_remove(self, step: int) -> str:
        """Describes for the user how to remove a permanent step, which is never removed automatically."""
        ...

    def save(self, step: int, arrays: Mapping[str, jax.Array], record: Mapping[str, Any]) -> Future[Any]:
        """Copies the arrays off the devices and writes them in the background. The future completes with the commit."""
        ...

    def wait(self) -> None:
        """Waits until all writes are complete."""
        ...

    def known_steps(self) -> list[int]:
        """Lists the complete steps in ascending order, without a request to a server."""
        ...

    def limit_save_time(self, seconds: float) -> None:
        """Limits the time of current and future saves that may take long. A save either completes or leaves no step.

        Args:
            seconds: time limit, counted from now.
        """
        ...

    def discard_unfinished(self) -> None:
        """Removes what a failed save has left behind."""
        ...

    def delete(self, steps: list[int]) -> None:
        """Deletes steps. Each step disappears atomically, and its data is then removed in the background."""
        ...

    def move_aside(self, step: int) -> str:
        """Hides a step but keeps its data, and returns the new location of the step."""
        ...

    def refresh(self) -> None:
        """Updates internal lists of steps. Must be called after one or more steps were moved aside."""
        ...

    def close(self) -> None:
        """Releases all resources."""
        ...


def move_damaged_aside(writer: Writer, bad: Mapping[int, CheckpointError]) -> None:
    """Moves damaged steps aside and logs each of them."""
    # No process may read a directory while process 0 renames it, or list the steps before the rename is complete.
    wait_for_all("bad checkpoints are known")
    for step, error in bad.items():
        target = writer.move_aside(step)
        logger.error("checkpoint %s cannot be used: %s; moved to %s", step, error, target)
    wait_for_all("bad checkpoints are moved")
