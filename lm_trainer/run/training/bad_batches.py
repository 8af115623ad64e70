"""The batch of a step whose loss or gradient was not finite, as a file to look at."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lm_trainer.core.batch import Batch

logger = logging.getLogger(__name__)

_MOST_FILES = 16


class BadBatchDump:
    """Holds the batches of the steps whose numbers are still on their way.

    Args:
        directory: where files go; at most 16 of them, so that a run which skips such steps does not fill the disk.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        # A step is judged after the next one has been started.
        self._recent: deque[tuple[int, Batch]] = deque(maxlen=2)

    def keep(self, step: int, batch: Batch) -> None:
        """Notes this process's rows of the batch that `step` trains on; steps count from 1."""
        self._recent.append((step, batch))

    def write(self, step: int) -> Path | None:
        """Writes the batch of a step as `.npz`, an array for each field of `Batch`; each process has its own file.

        Returns:
            The file; None where it cannot be written, or where there are enough.
        """
        batch = next((batch for kept, batch in self._recent if kept == step), None)
        name = f"step-{step}.npz" if jax.process_count() == 1 else f"step-{step}.process-{jax.process_index()}.npz"
        file = self._directory / name
        if batch is None or len(list(self._directory.glob("*.npz"))) >= _MOST_FILES:
            return None
        arrays: dict[str, Any] = {field: np.asarray(x) for field, x in batch._asdict().items() if x is not None}
        # Renamed when it is whole, since the run may end at any time.
        draft = file.with_name(f".{name}.tmp")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with draft.open("wb") as stream:
                np.savez(stream, **arrays)
                stream.flush()
                os.fsync(stream.fileno())
            draft.replace(file)
        except OSError as error:
            logger.warning("%s: the batch of step %d could not be written (%s)", file, step, error.strerror or error)
            with contextlib.suppress(OSError):
                draft.unlink()
            return None
        return file
