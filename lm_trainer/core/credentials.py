"""Credentials in URLs: `scheme://user:password@host` and signed queries must reach no log, record or service."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_USER = re.compile(r"(?<=://)[^/\s\"']*@")
_QUERY = re.compile(
    r"([?&](?:[\w.-]*(?:token|secret|passw|signature|credential|api[-_]?key|access[-_]?key)[\w.-]*|sig|key)=)[^&#\s\"']+",
    re.IGNORECASE,
)


def without_credentials(value: Any) -> Any:
    """A copy of a text, or of plain containers of texts, in which `https://user:password@host?token=x` is
    `https://***@host?token=***`; other values are the same.
    """
    if isinstance(value, str):
        return _QUERY.sub(r"\1***", _USER.sub("***@", value))
    if isinstance(value, Mapping):
        return {key: without_credentials(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_credentials(v) for v in value]
    return value
