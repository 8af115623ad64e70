"""Reads the transaction logs of W&B, which contain the records of a run on this machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from glob import escape
from pathlib import Path

_HEADER, _BLOCK = 7, 1 << 15
"""Size in bytes of the file header and of each fragment header, and size of a block. Fragments never cross blocks."""
_FULL, _FIRST, _LAST = 1, 2, 4
"""Kinds of fragments: a complete record, the first fragment of a record, and its last fragment."""


def read_logged_steps(directory: Path, run_id: str, step_key: str) -> dict[str, set[int]]:
    """Returns the steps at which each key was logged in a run, from the logs of the run in `directory`/wandb."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    steps: dict[str, set[int]] = defaultdict(set)
    name = escape(run_id)
    # The directory's name may have a suffix: W&B appends one if it started the same run twice within a second.
    for file in sorted(directory.glob(f"wandb/*run-*-{name}*/run-{name}.wandb")):
        for content in _iter_records(file.read_bytes()):
            try:
                keys = {item.key or item.nested_key[0]: item for item in Record.FromString(content).history.item}
                step = int(keys[step_key].value_json) if step_key in keys else None
            # The record may be damaged by a power cut. The error class of protobuf is in W&B's own copy of that
            # package.
            except Exception:
                continue
            if step is not None:
                for key in keys:
                    steps[key].add(step)
    return steps


def _iter_records(data: bytes) -> Iterator[bytes]:
    """Yields the complete records in a log in LevelDB's format.

    Each fragment starts with a CRC (4 bytes), its length (2 bytes) and its kind (1 byte).
    """
    offset, parts = _HEADER, []
    while offset + _HEADER <= len(data):
        left = _BLOCK - offset % _BLOCK
        length, kind = int.from_bytes(data[offset + 4 : offset + 6], "little"), data[offset + 6]
        # The end of a block is filled with zeros, and so is the part that was not written before a power cut.
        if left < _HEADER or not kind:
            offset += left
            continue
        if kind in (_FULL, _FIRST):
            parts = []
        offset += _HEADER
        if offset + length > len(data):
            return
        parts.append(data[offset : offset + length])
        offset += length
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
