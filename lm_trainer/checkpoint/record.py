"""The JSON that is saved with a step, and errors of steps that cannot be read."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

from lm_trainer.core.errors import MachineError
from lm_trainer.core.seal import is_sealed

FORMAT = 2
# Checkpoints of the first format have no checksum of their metadata, and are still read.
_FORMAT_WITHOUT_CHECKSUM = 1
_LONGEST = 300
"""Characters of an error that a message quotes."""


class CheckpointError(Exception):
    """A checkpoint that cannot be trusted: incomplete, unreadable, or not what was written."""


def checked(record: Any) -> dict[str, Any]:
    """Returns a record as it was saved.

    Raises:
        CheckpointError: when it is damaged.
    """
    if not isinstance(record, dict) or "digests" not in record:
        raise CheckpointError("its metadata is missing")
    if record.get("format") != _FORMAT_WITHOUT_CHECKSUM and not is_sealed(record):
        raise CheckpointError("the checksum of its metadata differs")
    return record


def describe(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Describes dtype and shape of each array, as `float32[12,64]`."""
    return {name: f"{x.dtype}[{','.join(map(str, x.shape))}]" for name, x in arrays.items()}


def root_cause(error: BaseException) -> str:
    """Finds the innermost message of a chain of exceptions: Orbax wraps the reason in misleading ones."""
    if isinstance(error, MachineError):
        return str(error)
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
