"""Credentials in URLs and keys that name a secret: neither may reach a log, a record or a service."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

_USER = re.compile(r"(?<=://)[^/\s\"']*@")
# Parameters of signed URLs (S3, GCS, Azure), and tokens in a query.
_QUERY = re.compile(
    r"([?&](?:[\w.-]*(?:token|secret|passw|signature|credential|api[-_]?key|access[-_]?key)[\w.-]*|sig|key)=)[^&#\s\"']+",
    re.IGNORECASE,
)


_SECRET_WORDS = {"token", "secret", "password", "passwd", "apikey", "credential", "credentials"}
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


def without_credentials(value: Any) -> Any:
    """Copies a text, or plain containers of texts, and blanks credentials in URLs; other values stay the same.

    `https://user:password@host?token=x` becomes `https://***@host?token=***`.
    """
    if isinstance(value, str):
        return _QUERY.sub(r"\1***", _USER.sub("***@", value))
    if isinstance(value, Mapping):
        return {key: without_credentials(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_credentials(v) for v in value]
    return value


def is_secret_name(name: str) -> bool:
    """Returns True if the words of a key name a secret: those of `hf_token` and `apiKey` do, `tokenizer` does not.

    Nor does `pad_token_id`: numbers of tokens in a vocabulary are no secret.
    """
    words = [word.lower() for word in _WORD.findall(name)]
    if words[-2:] in (["token", "id"], ["token", "ids"]):
        words = words[:-2]
    pairs = itertools.pairwise(words)
    return not _SECRET_WORDS.isdisjoint(words) or any(pair in (("api", "key"), ("access", "key")) for pair in pairs)
