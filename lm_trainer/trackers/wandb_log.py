"""The transaction logs in which W&B keeps the records of a run on this machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

_HEADER, _BLOCK = 7, 1 << 15
"""Bytes of the header of a file and of each part of a record; bytes of a block, across whose end no part goes."""
_LAST_PARTS = (1, 4)
"""Kinds of parts with which a record is whole: one that is alone, and the last of several."""


def steps_in_logs(directory: Path, run_id: str, step_key: str) -> dict[str, set[int]]:
    """The steps of each key in the histories of a run, as its logs below `directory`/wandb have them."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    steps: dict[str, set[int]] = defaultdict(set)
    for file in sorted(directory.glob(f"wandb/*run-*-{run_id}/run-{run_id}.wandb")):
        for content in _records(file.read_bytes()):
            try:
                record = Record.FromString(content)
            # Of a part that a power cut has spoilt; the class of protobuf's error is that of a package of W&B's.
            except Exception:
                continue
            if record.WhichOneof("record_type") != "history":
                continue
            keys = {item.key or item.nested_key[0]: item for item in record.history.item}
            if step_key in keys:
                step = int(keys[step_key].value_json)
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
        at += _HEADER
        if at + length > len(data):
            return
        parts.append(data[at : at + length])
        at += length
        if kind in _LAST_PARTS:
            yield b"".join(parts)
            parts = []
