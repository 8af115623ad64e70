"""Sanitises untrusted text for terminals (control characters) and for single-line comments (line feeds)."""

from __future__ import annotations

import json
import re
from typing import Any

# Control characters except tab and line feed, line and paragraph separators, and bidirectional overrides, which can
# make text read differently from its content (arXiv:2111.00169).
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_BREAK = re.compile(rf"[\t\n]|{_CONTROL.pattern}")


def escape_for_terminal(text: str) -> str:
    """Replaces characters that could control a terminal or mislead the reader."""
    return _CONTROL.sub("\ufffd", text)


def escape_line(text: str) -> str:
    r"""Escapes the same characters, tabs and line feeds (`\n`), so that a text cannot end a line or a comment."""
    return _BREAK.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def json_line(value: Any) -> str:
    """Formats JSON on one line. Non-ASCII letters stay readable, and control characters become JSON escapes."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))
