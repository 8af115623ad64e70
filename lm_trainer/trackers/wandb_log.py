"""Reads W&B's transaction logs, which contain the records of a run on this machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from glob import escape
from pathlib import Path

_HEADER, _BLOCK = 7, 1 << 15
"""Bytes of the file header and of each fragment's header; bytes of a block, which fragments never cross."""
_FULL, _FIRST, _LAST = 1, 2, 4
"""Kinds of fragments: a complete record, and the first and the last fragment of a record."""


def read_logged_steps(directory: Path, run_id: str, step_key: str) -> dict[str, set[int]]:
    """The steps of each key in the history of a run, from its logs below `directory`/wandb."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    steps: dict[str, set[int]] = defaultdict(set)
    name = escape(run_id)
    for file in sorted(directory.glob(f"wandb/*run-*-{name}/run-{name}.wandb")):
        for content in _iter_records(file.read_bytes()):
            try:
                keys = {item.key or item.nested_key[0]: item for item in Record.FromString(content).history.item}
                step = int(keys[step_key].value_json) if step_key in keys else None
            # A record damaged by a power cut; protobuf's error class is in W&B's copy of the package.
            except Exception:
                continue
            if step is not None:
                for key in keys:
                    steps[key].add(step)
    return steps


def _iter_records(data: bytes) -> Iterator[bytes]:
    """The complete records of a log in LevelDB's format: fragments start with CRC (4 bytes), length (2), kind (1)."""
    offset, parts = _HEADER, []
    while offset + _HEADER <= len(data):
        left = _BLOCK - offset % _BLOCK
        length, kind = int.from_bytes(data[offset + 4 : offset + 6], "little"), data[offset + 6]
        # Zeros fill the end of a block, and the unwritten part after a power cut.
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
