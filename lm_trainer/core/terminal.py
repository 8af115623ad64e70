"""Text of others at a terminal, which obeys control characters, and in comments, which a line feed ends."""

from __future__ import annotations

import json
import re
from typing import Any

# All but tab and line feed of the control characters, the separators of lines and paragraphs, and what turns the
# direction of the text that follows it, so that it seems to say something else (arXiv:2111.00169).
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_BREAK = re.compile(rf"[\t\n]|{_CONTROL.pattern}")


def for_terminal(text: str) -> str:
    """Replaces each character by which a text could command a terminal, or mislead who reads it there."""
    return _CONTROL.sub("\ufffd", text)


def one_line(text: str) -> str:
    r"""Writes such characters, tabs and line feeds as escapes (`\n`), so that a text cannot end a line or a comment."""
    return _BREAK.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def json_line(value: Any) -> str:
    """Writes JSON on one line, with readable letters of all languages; such characters are escapes of JSON."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))
