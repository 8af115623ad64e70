"""The JSON that is saved with a step, and errors of steps that cannot be read."""

from __future__ import annotations

import errno
import json
import zlib
from collections.abc import Mapping
from typing import Any

from lm_trainer.core.errors import MachineError

FORMAT = 2
# Checkpoints of the first format have no checksum of their metadata, and are still read.
_FORMAT_WITHOUT_CHECKSUM = 1
_LONGEST = 300
"""Characters of an error that a message quotes."""


class CheckpointError(Exception):
    """A checkpoint that cannot be trusted: incomplete, unreadable, or not what was written."""


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a record, with the checksum of all else."""
    # It is written in the background, when its owner may have put other losses into it.
    copy = json.loads(json.dumps({name: value for name, value in record.items() if name != "checksum"}))
    return {**copy, "checksum": _checksum(copy)}


def checked(record: Any) -> dict[str, Any]:
    """Returns a record as it was saved.

    Raises:
        CheckpointError: when it is damaged.
    """
    if not isinstance(record, dict) or "digests" not in record:
        raise CheckpointError("its metadata is missing")
    if record.get("format") != _FORMAT_WITHOUT_CHECKSUM and record.get("checksum") != _checksum(record):
        raise CheckpointError("the checksum of its metadata differs")
    return record


def _checksum(record: Mapping[str, Any]) -> int:
    """CRC-32 of everything else in the JSON that is saved with a step."""
    others = {name: value for name, value in record.items() if name != "checksum"}
    return zlib.crc32(json.dumps(others, sort_keys=True).encode())


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
