"""Interfaces for reading and writing the steps of a run, on disk or in a bucket."""

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
"""Function from step -> reason to the error that ends a run if all its checkpoints are damaged."""


class DirectoryLock(Protocol):
    """Lock of the directory against other processes."""

    def check_lock_held(self) -> None:
        """Raises `MachineError` if another process has taken the directory; sends no request."""
        ...

    def before_commit(self, seconds: float) -> None:
        """Called from any thread before a step is committed in a bucket; raises if it must not be.

        Args:
            seconds: time left for the check.
        """
        ...


class NoLock:
    """Null lock, for a directory unknown to other processes."""

    def check_lock_held(self) -> None: ...

    def before_commit(self, seconds: float) -> None: ...


class Steps(Protocol):
    """Reader of checkpoint steps."""

    directory: Any
    """A `StoragePath`."""

    def list_steps(self) -> list[int]:
        """Lists the complete steps in order; empty if the directory does not exist."""
        ...

    def read_record(self, step: int) -> dict[str, Any]:
        """Reads the JSON record of a step; raises `CheckpointError` if it is missing or damaged."""
        ...

    def read_arrays(
        self, step: int, record: Mapping[str, Any], like: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.Array]:
        """Reads arrays of a step without verification; raises `CheckpointError` if they cannot be read."""
        ...

    def open_writer(self, all_damaged: AllDamaged, lock: DirectoryLock) -> Writer:
        """Opens the directory for writing, and removes leftovers of killed attempts.

        Args:
            all_damaged: see `AllDamaged`.
            lock: lock of the directory.
        """
        ...


class Writer(Protocol):
    """Writer of checkpoint steps; all processes of a run make the same calls."""

    @property
    def directory(self) -> StoragePath: ...

    @property
    def remedy(self) -> str:
        """Advice to the user after a failed save."""
        ...

    def how_to_remove(self, step: int) -> str:
        """Tells the user how to remove a permanent step, which is never done automatically."""
        ...

    def save(self, step: int, arrays: Mapping[str, jax.Array], record: Mapping[str, Any]) -> Future[Any]:
        """Copies the arrays off the devices and writes them in the background; the future completes on commit."""
        ...

    def wait(self) -> None:
        """Waits until all writes are complete."""
        ...

    def known_steps(self) -> list[int]:
        """Lists the complete steps in order, without a request to a server."""
        ...

    def limit_save_time(self, seconds: float) -> None:
        """Limits every save that can take long to this many seconds; a save completes or leaves no step."""
        ...

    def discard_unfinished(self) -> None:
        """Removes leftovers of a failed save."""
        ...

    def delete(self, steps: list[int]) -> None:
        """Deletes steps: first each step disappears atomically, then its data is removed in the background."""
        ...

    def move_aside(self, step: int) -> str:
        """Hides a step, but keeps its data; returns the new location."""
        ...

    def refresh(self) -> None:
        """Called after the last of several steps was moved aside."""
        ...

    def close(self) -> None:
        """Releases all resources."""
        ...


def move_damaged_aside(writer: Writer, bad: Mapping[int, CheckpointError]) -> None:
    """Moves damaged steps aside, and logs each of them."""
    # No process may read a directory while process 0 renames it, nor list it before the rename is done.
    wait_for_all("bad checkpoints are known")
    for step, error in bad.items():
        target = writer.move_aside(step)
        logger.error("checkpoint %s cannot be used: %s; moved to %s", step, error, target)
    wait_for_all("bad checkpoints are moved")
