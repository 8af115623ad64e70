"""The transaction logs in which W&B keeps the records of a run on this machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from glob import escape
from pathlib import Path

_HEADER, _BLOCK = 7, 1 << 15
"""Bytes of the header of a file and of each part of a record; bytes of a block, across whose end no part goes."""
_ALONE, _FIRST, _LAST = 1, 2, 4
"""Kinds of parts: one that is a record, and the first and the last of several."""


def steps_in_logs(directory: Path, run_id: str, step_key: str) -> dict[str, set[int]]:
    """The steps of each key in the histories of a run, as its logs below `directory`/wandb have them."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    steps: dict[str, set[int]] = defaultdict(set)
    name = escape(run_id)
    for file in sorted(directory.glob(f"wandb/*run-*-{name}/run-{name}.wandb")):
        for content in _records(file.read_bytes()):
            try:
                keys = {item.key or item.nested_key[0]: item for item in Record.FromString(content).history.item}
                step = int(keys[step_key].value_json) if step_key in keys else None
            # A record that a power cut has spoilt; the class of protobuf's error is that of a package of W&B's.
            except Exception:
                continue
            if step is not None:
                for key in keys:
                    steps[key].add(step)
    return steps


def _records(data: bytes) -> Iterator[bytes]:
    """The whole records of a log, in LevelDB's format: CRC (4 bytes), length (2) and kind (1) before each part."""
    at, parts = _HEADER, []
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        # Zeros fill the end of a block, and what a power cut has left unwritten.
        if left < _HEADER or not kind:
            at += left
            continue
        if kind in (_ALONE, _FIRST):
            parts = []
        at += _HEADER
        if at + length > len(data):
            return
        parts.append(data[at : at + length])
        at += length
        if kind in (_ALONE, _LAST):
            yield b"".join(parts)
