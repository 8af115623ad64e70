"""Interface of a place that holds the steps of a run, which the store reads and writes alike wherever it lies."""

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

NoneUsable = Callable[[Mapping[int, CheckpointError]], Exception]
"""Makes the error that ends a run whose checkpoints are all damaged, each for its reason."""


class Holder(Protocol):
    """Guard of the directory against other processes."""

    def check_held(self) -> None:
        """Raises `MachineError` when another process has got in; costs nothing."""
        ...

    def before_commit(self, seconds: float) -> None:
        """Called, from any thread, before a step appears in a bucket; raises where it must not.

        Args:
            seconds: that are left for it.
        """
        ...


class Nobody:
    """A holder of a directory that no other process knows."""

    def check_held(self) -> None: ...

    def before_commit(self, seconds: float) -> None: ...


class Steps(Protocol):
    """Steps as they are read."""

    directory: Any
    """A `Place`."""

    def committed(self) -> list[int]:
        """Lists the complete steps in order; empty when there is no such directory."""
        ...

    def record(self, step: int) -> dict[str, Any]:
        """Reads the JSON that was saved with a step; raises `CheckpointError` when it is missing or damaged."""
        ...

    def arrays(
        self, step: int, record: Mapping[str, Any], like: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.Array]:
        """Reads arrays of a step, unverified; raises `CheckpointError` when they cannot be read."""
        ...

    def writer(self, none_usable: NoneUsable, holder: Holder) -> Writer:
        """Opens the directory for writing, and removes what an attempt that was killed has left.

        Args:
            none_usable: see `NoneUsable`.
            holder: of the directory.
        """
        ...


class Writer(Protocol):
    """Steps as they are written, by all processes of a run alike."""

    @property
    def directory(self) -> StoragePath: ...

    @property
    def remedy(self) -> str:
        """Advice to the user for a save that failed."""
        ...

    def how_to_remove(self, step: int) -> str:
        """Tells the user how to remove a permanent step, which nothing here does."""
        ...

    def save(self, step: int, arrays: Mapping[str, jax.Array], record: Mapping[str, Any]) -> Future[Any]:
        """Copies the arrays off the devices and writes them in the background; the result is there when the step is."""
        ...

    def wait(self) -> None:
        """Returns when nothing is being written any more."""
        ...

    def present(self) -> list[int]:
        """Lists the complete steps in order, without asking a server."""
        ...

    def hurry(self, seconds: float) -> None:
        """Ends every save within so many seconds, whole or not at all, where it can take long."""
        ...

    def discard_unfinished(self) -> None:
        """Removes what a save that failed has left."""
        ...

    def delete(self, steps: list[int]) -> None:
        """Deletes steps: each is gone as a whole first, and its data after that, in the background."""
        ...

    def move_aside(self, step: int) -> str:
        """Makes a step invisible, but keeps it; returns its new place."""
        ...

    def moved(self) -> None:
        """Called after the last step of several has been moved aside."""
        ...

    def close(self) -> None:
        """Releases everything."""
        ...


def set_aside(writer: Writer, bad: Mapping[int, CheckpointError]) -> None:
    """Moves steps that cannot be trusted aside, each with a line in the log."""
    # No process may still read a directory while process 0 renames it, nor list it before that is done.
    wait_for_all("bad checkpoints are known")
    for step, why in bad.items():
        target = writer.move_aside(step)
        logger.error("checkpoint %s cannot be used: %s; moved to %s", step, why, target)
    wait_for_all("bad checkpoints are moved")
