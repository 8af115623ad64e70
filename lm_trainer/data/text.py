"""What may stand in a document."""

from __future__ import annotations

import re

_SURROGATE = re.compile("[\ud800-\udfff]")


def clean(text: str) -> str:
    """Replaces lone surrogates, which JSON can carry but UTF-8 cannot, by U+FFFD. Returns `text` itself if clean."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return _SURROGATE.sub("\ufffd", text)
    return text
