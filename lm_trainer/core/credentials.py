"""Blanks credentials in URLs, commands and secret keys before they reach a log, a record or a service."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

_USER = re.compile(r"(?<=://)[^/\s\"']*@")
# Matches parameters of signed URLs (S3, GCS, Azure), and tokens in a query.
_QUERY = re.compile(
    r"([?&](?:[\w.-]*(?:token|secret|passw|signature|credential|api[-_]?key|access[-_]?key)[\w.-]*|sig|key)=)[^&#\s\"']+",
    re.IGNORECASE,
)
# Webhook addresses are secrets themselves, because anyone who knows one can post to it.
_HOOK = re.compile(
    r"(https?://(?:hooks?\.[^\s\"'/]+/|[\w.-]*discord(?:app)?\.com/api/[\w/]*?webhooks/|api\.telegram\.org/bot"
    r"|hc-ping\.com/))[^\s\"'?#]+",
    re.IGNORECASE,
)
# Tokens recognised by their format: Hugging Face, OpenAI and similar, GitHub, Slack and AWS.
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{30,}|sk-(?=[\w-]{0,99}\d)(?=[\w-]{0,99}[A-Z])[\w-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}"
    r"|github_pat_\w{30,}|xox[a-z]-[\w-]{10,}|AKIA[0-9A-Z]{16})\b"
)
_BEARER = re.compile(r"\b(Bearer\s+)(?=\S{0,99}\d)[\w.~+/=-]{8,}")

COMMAND = "command"
"""Key whose value is a shell command, in which more parts may be secrets than in other texts."""
_VALUE = r"(?:\"[^\"]*\"|'[^']*'|[^\s\"']+)"
_SECRETS_OF_COMMANDS = (
    # `Authorization: x` in a header, `"token": "x"` in JSON.
    re.compile(r"(?<![\w-])([\w-]+)(\s*:\s*|\"\s*:\s*\"?|'\s*:\s*'?)(?!//)[^\"'\s][^\"']*"),
    re.compile(rf"(?<![\w./-])(-{{0,2}}[A-Za-z_][\w.-]*)(=){_VALUE}"),
    re.compile(rf"(?<!\S)--([\w.-]+)(\s+){_VALUE}"),
)
"""Patterns of a name (group 1), a separator (group 2) and a value, which is a secret if the name is a secret's."""
_LOGIN = re.compile(rf"(?<!\S)(-u|--user|--proxy-user)(=|\s+){_VALUE}")
_LOGIN_HEADERS = {"authorization", "proxy-authorization", "cookie"}
_URL = re.compile(r"https?://[^\s\"']+")
# Matches a random-looking part of a path.
_RANDOM = re.compile(r"(?<=/)(?=[^/?#]*\d)[^/?#]{16,}")

_SECRET_WORDS = {"token", "secret", "password", "passwd", "apikey", "credential", "credentials"}
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


def without_credentials(value: Any) -> Any:
    """Returns a copy of a text or of plain containers of texts, with credentials blanked.

    `https://user:password@host?token=x` becomes `https://***@host?token=***`. Webhook addresses and tokens of a
    recognisable format are also blanked. In the value of the key `command`, so are options, headers and variables
    that have the name of a secret. Values that are not text are unchanged.
    """
    if isinstance(value, str):
        blanked = _QUERY.sub(r"\1***", _USER.sub("***@", value))
        return _BEARER.sub(r"\1***", _TOKEN.sub("***", _HOOK.sub(r"\1***", blanked)))
    if isinstance(value, Mapping):
        return {
            key: _command_without_credentials(v) if key == COMMAND and isinstance(v, str) else without_credentials(v)
            for key, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_credentials(v) for v in value]
    return value


def _command_without_credentials(command: str) -> str:
    def blank_credentials(match: re.Match[str]) -> str:
        is_secret = is_secret_name(match[1]) or match[1].lower() in _LOGIN_HEADERS
        return f"{match[0][: match.end(2) - match.start()]}***" if is_secret else match[0]

    blanked = _LOGIN.sub(r"\1\2***", without_credentials(command))
    for pattern in _SECRETS_OF_COMMANDS:
        blanked = pattern.sub(blank_credentials, blanked)
    # The host is kept, to identify the command.
    return _URL.sub(lambda url: _RANDOM.sub("***", url[0]), blanked)


def is_secret_name(name: str) -> bool:
    """Returns True if the words of a key name a secret, as in `hf_token` and `apiKey` but not in `tokenizer`.

    Also returns False for `pad_token_id`, because token IDs of a vocabulary are not secret.
    """
    words = [word.lower() for word in _WORD.findall(name)]
    if words[-2:] in (["token", "id"], ["token", "ids"]):
        words = words[:-2]
    pairs = itertools.pairwise(words)
    return not _SECRET_WORDS.isdisjoint(words) or any(pair in (("api", "key"), ("access", "key")) for pair in pairs)
