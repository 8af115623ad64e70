"""Ids of runs: the names of their directories, wherever they come from."""

from __future__ import annotations

import re

_ID = re.compile(r"[\w][\w.-]*")


def run_id_problem(value: object) -> str | None:
    """Says why an id cannot name a run, and what to write instead; None where it can."""
    if isinstance(value, str) and _ID.fullmatch(value):
        return None
    return f"{value!r} cannot name a directory; use letters, digits, '.', '_' and '-'"
