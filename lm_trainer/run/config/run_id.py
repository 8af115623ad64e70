"""Run IDs, which are also directory names."""

from __future__ import annotations

import re

_ID = re.compile(r"[\w][\w.-]*")


def explain_invalid_run_id(value: object) -> str | None:
    """Explains why a run ID is invalid and how to fix it. Returns None if it is valid."""
    if isinstance(value, str) and _ID.fullmatch(value):
        return None
    return f"{value!r} cannot name a directory; use letters, digits, '.', '_' and '-'"
