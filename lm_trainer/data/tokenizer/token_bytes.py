"""UTF-8 bytes of text that tokens stand for, by which losses of different tokenizers are compared.

Shape letters: V vocabulary.
"""

from __future__ import annotations

import json
import re

import numpy as np
from tokenizers import Tokenizer as RustTokenizer

from lm_trainer.data.tokenizer.base import TOKENIZER_FILE, HfTokenizer
from lm_trainer.data.tokenizer.bytes import byte_characters

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
"""A single byte in vocabularies with byte fallback."""


def token_bytes(tokenizer: HfTokenizer) -> np.ndarray:
    """Counts the UTF-8 bytes of text that each token stands for: int32 [V]; 0 for special tokens and unused ids."""
    content = tokenizer.files()[TOKENIZER_FILE].decode()
    rust = RustTokenizer.from_str(content)
    added = rust.get_added_tokens_decoder()
    # In GPT-2's alphabet each character stands for a byte, so that tokens which end inside of a character are exact.
    bytes_by_character = set(byte_characters()) if "ByteLevel" in json.dumps(json.loads(content)["decoder"]) else set()
    # Between two others, since decoders treat the first token of a text in ways of their own.
    around = _around(rust)
    empty = len(rust.decode([around, around]).encode())
    counts_V = np.zeros(tokenizer.vocab_size, np.int32)
    for token, index in rust.get_vocab(with_added_tokens=True).items():
        if index in added:
            counts_V[index] = 0 if added[index].special else len(added[index].content.encode())
        elif bytes_by_character and bytes_by_character.issuperset(token):
            counts_V[index] = len(token)
        elif _BYTE_TOKEN.fullmatch(token):
            counts_V[index] = 1
        else:
            counts_V[index] = max(len(rust.decode([around, index, around]).encode()) - empty, 0)
    return counts_V


def _around(rust: RustTokenizer) -> int:
    ids = rust.encode("a", add_special_tokens=False).ids
    return ids[-1] if ids else 0
