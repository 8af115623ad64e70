"""The JSON record that is saved with a step, and errors about unreadable steps."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

from lm_trainer.core.checksummed import has_valid_checksum
from lm_trainer.core.errors import MachineError

FORMAT = 2
# The first format has no checksum of the metadata. Checkpoints in this format can still be read.
_FORMAT_WITHOUT_CHECKSUM = 1
_MAX_CHARS = 300
"""Maximum number of characters to quote from an error message."""


class CheckpointError(Exception):
    """A checkpoint that is incomplete, unreadable or corrupt."""


def verify_record(record: Any) -> dict[str, Any]:
    """Verifies the checksum of a record, and returns the record.

    Raises:
        CheckpointError: if the record is damaged.
    """
    if not isinstance(record, dict) or "digests" not in record:
        raise CheckpointError("its metadata is missing")
    if record.get("format") != _FORMAT_WITHOUT_CHECKSUM and not has_valid_checksum(record):
        raise CheckpointError("the checksum of its metadata differs")
    return record


def describe_arrays(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Describes the dtype and shape of each array as text, such as `float32[12,64]`."""
    return {name: f"{x.dtype}[{','.join(map(str, x.shape))}]" for name, x in arrays.items()}


def root_cause(error: BaseException) -> str:
    """Returns the message of the innermost exception in a chain: Orbax wraps the cause in misleading exceptions."""
    if isinstance(error, MachineError):
        return str(error)
    visited: set[BaseException] = {error}
    # The chain may be a cycle if a thread raises the error of another thread. If a failed save is waited for twice, the
    # chain includes the `MachineError` of the first time.
    while (inner := error.__cause__ or error.__context__) is not None:
        if inner in visited or isinstance(inner, MachineError):
            break
        visited.add(inner)
        error = inner
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "no space left on device"
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    # TensorStore names the file first and the problem last, so the middle is dropped.
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS // 2]} ... {text[-_MAX_CHARS // 2 :]}"
