"""Writes the batches of steps with a non-finite loss or gradient to files."""

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
    """Keeps the batches of recent steps until the metrics of these steps have been read.

    Args:
        directory: directory for the files. At most 16 files are written, so that a run that skips such steps does not
            fill the disk.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        # Two batches, because the metrics of a step are read after the next step has started.
        self._recent: deque[tuple[int, Batch]] = deque(maxlen=2)

    def keep(self, step: int, batch: Batch) -> None:
        """Keeps the rows of this process in the batch of `step`, which counts from 1."""
        self._recent.append((step, batch))

    def write(self, step: int) -> Path | None:
        """Writes the batch of a step to an `.npz` file with one array per field of `Batch`.

        Each process writes its own file.

        Returns:
            The path of the file; None if it cannot be written, or if the maximum number of files has been reached.
        """
        batch = next((batch for kept_step, batch in self._recent if kept_step == step), None)
        name = f"step-{step}.npz" if jax.process_count() == 1 else f"step-{step}.process-{jax.process_index()}.npz"
        file = self._directory / name
        if batch is None or len(list(self._directory.glob("*.npz"))) >= _MAX_FILES:
            return None
        fields = {**batch._replace(frozen=None)._asdict(), **(batch.frozen or {})}
        arrays: dict[str, Any] = {field: np.asarray(x) for field, x in fields.items() if x is not None}
        # The file is renamed when it is complete, because the run may end at any time.
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
