"""A tokenizer with bytes as tokens. It needs no training and no download, and encodes every text exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from lm_trainer.data.tokenizer.base import EOS_TOKEN, HfTokenizer, TokenizerConfig

EOS_ID = 256


class BytesTokenizer(TokenizerConfig):
    """Each byte of the UTF-8 text is a token. With the end-of-document token, the vocabulary has 257 tokens."""

    type: Literal["bytes"] = "bytes"

    vocab_size: ClassVar[int] = EOS_ID + 1


class ByteTokenizer(HfTokenizer):
    """A tokenizer whose ids are byte values. 256 is the end-of-document token."""

    backend = "bytes"
    package = None
    batch_bytes = 8 << 20

    def __init__(
        self,
        content: str | None = None,
        settings: Mapping[str, object] | None = None,
        extras: Mapping[str, bytes] | None = None,
        *,
        origin: str = "bytes",
    ):
        super().__init__(content or CONTENT, settings, extras, origin=origin)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[Any]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(int(i) for i in ids if i < EOS_ID).decode("utf-8", "replace")

    def decode_all(self, ids: Sequence[int]) -> str:
        pieces = (EOS_TOKEN.encode() if i == EOS_ID else bytes([i]) for i in map(int, ids) if i <= EOS_ID)
        return b"".join(pieces).decode("utf-8", "replace")


def byte_characters() -> list[str]:
    """Returns the character that byte-level vocabularies use for each byte, as in GPT-2's `bytes_to_unicode`."""
    # Printable bytes map to themselves, and others to characters from 0x100 on, so no token has control codes or
    # blanks.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(substitutes)) for byte in range(256)]


def _tokenizer_json() -> str:
    """Returns the tokenizer as a `tokenizer.json`, so that exported models work in other programs."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    special = {"id": EOS_ID, "content": EOS_TOKEN, "special": True, "normalized": False}
    special |= {"single_word": False, "lstrip": False, "rstrip": False}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    model |= {"continuing_subword_prefix": None, "end_of_word_suffix": None, "ignore_merges": False}
    model |= {"vocab": {character: byte for byte, character in enumerate(byte_characters())}, "merges": []}
    parts = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [special], "normalizer": None}
    parts |= {"pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model}
    return json.dumps(parts, indent=2, ensure_ascii=False)


CONTENT = _tokenizer_json()
"""The `tokenizer.json` of the byte tokenizer. It is constant, so that `load_tokenizer` recognises a saved copy."""
