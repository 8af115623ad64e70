"""JSON records with a checksum of their content."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

CHECKSUM = "checksum"
"""Key of the CRC-32 of everything else in a record."""


def with_checksum(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a record with the checksum of its other keys."""
    # A deep copy, because the caller may keep changing the record.
    copy = json.loads(json.dumps(_without_checksum(record)))
    return {**copy, CHECKSUM: _checksum(copy)}


def has_valid_checksum(record: Mapping[str, Any]) -> bool:
    """Returns True if the checksum of a record matches its other keys."""
    return record.get(CHECKSUM) == _checksum(record)


def _checksum(record: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(_without_checksum(record), sort_keys=True).encode())


def _without_checksum(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != CHECKSUM}
