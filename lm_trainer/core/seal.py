"""Records in JSON that say by a checksum whether they are as they were written."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

CHECKSUM = "checksum"
"""Key of the CRC-32 of everything else in a record."""


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a record, with the checksum of all else."""
    # Its owner may go on changing it.
    copy = json.loads(json.dumps(_without_checksum(record)))
    return {**copy, CHECKSUM: _checksum(copy)}


def is_sealed(record: Mapping[str, Any]) -> bool:
    """Returns True if a record has the checksum of all else."""
    return record.get(CHECKSUM) == _checksum(record)


def _checksum(record: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(_without_checksum(record), sort_keys=True).encode())


def _without_checksum(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != CHECKSUM}
