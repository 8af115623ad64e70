"""Keys that name a secret: a configuration is saved with the run and shown, so it must never hold one."""

from __future__ import annotations

import itertools
import re

_SECRET = {"token", "secret", "password", "passwd", "apikey", "credential", "credentials"}
_PART = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


def is_secret_name(name: str) -> bool:
    """Whether a key names a secret, by its whole words: `hf_token` and `apiKey` do, `tokenizer` and `tokens` do not."""
    parts = [part.lower() for part in _PART.findall(name)]
    pairs = itertools.pairwise(parts)
    return not _SECRET.isdisjoint(parts) or any(pair in (("api", "key"), ("access", "key")) for pair in pairs)


REFUSAL = (
    "looks like a secret, and a configuration is saved with the run; remove it and set it in the environment "
    "(HF_TOKEN, WANDB_API_KEY)"
)
