"""Dumps of the batches of steps with a non-finite loss or gradient."""

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

_MAX_FILES = 16


class BadBatchDump:
    """Holds the batches of recent steps until their metrics have been read.

    Args:
        directory: directory of the files; at most 16, so that a run skipping such steps does not fill the disk.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        # The metrics of a step are read after the next one has started.
        self._recent: deque[tuple[int, Batch]] = deque(maxlen=2)

    def keep(self, step: int, batch: Batch) -> None:
        """Keeps this process's rows of the batch of `step`; steps count from 1."""
        self._recent.append((step, batch))

    def write(self, step: int) -> Path | None:
        """Writes the batch of a step as `.npz`, with an array per field of `Batch` and one file per process.

        Returns:
            The file; None if it cannot be written, or the maximum number of files is reached.
        """
        batch = next((batch for kept_step, batch in self._recent if kept_step == step), None)
        name = f"step-{step}.npz" if jax.process_count() == 1 else f"step-{step}.process-{jax.process_index()}.npz"
        file = self._directory / name
        if batch is None or len(list(self._directory.glob("*.npz"))) >= _MAX_FILES:
            return None
        arrays: dict[str, Any] = {field: np.asarray(x) for field, x in batch._asdict().items() if x is not None}
        # Renamed when complete, because the run may end at any time.
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
