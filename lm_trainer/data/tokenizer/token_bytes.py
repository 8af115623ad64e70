"""UTF-8 bytes of text that tokens stand for, by which losses of different tokenizers are compared.

Shape letters: V vocabulary.
"""

from __future__ import annotations

import json
import re

import numpy as np
from tokenizers import Tokenizer as RustTokenizer

from lm_trainer.data.tokenizer.base import HfTokenizer
from lm_trainer.data.tokenizer.bytes import byte_characters
from lm_trainer.data.tokenizer.files import TOKENIZER_FILE
from lm_trainer.data.tokenizer.rust import open_rust

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
"""A single byte in vocabularies with byte fallback."""


def token_bytes(tokenizer: HfTokenizer) -> np.ndarray:
    """Counts the UTF-8 bytes of text that each token stands for: int32 [V]; 0 for special tokens and unused ids."""
    return np.array([len(text or b"") for text in token_texts(tokenizer)], np.int32)


def token_texts(tokenizer: HfTokenizer) -> list[bytes | None]:
    """The UTF-8 bytes that each token stands for within a text, by its id; None for special tokens and unused ids.

    Bytes of a single token need not be UTF-8: characters may be cut.
    """
    content = tokenizer.files()[TOKENIZER_FILE].decode()
    rust = open_rust(content)
    added = rust.get_added_tokens_decoder()
    # In GPT-2's alphabet each character stands for a byte, so that tokens which end inside of a character are exact.
    byte_level = "ByteLevel" in json.dumps(json.loads(content)["decoder"])
    byte_of = {character: byte for byte, character in enumerate(byte_characters())} if byte_level else {}
    # Between two others, since decoders treat the first token of a text in ways of their own.
    around = _around(rust)
    before = len(rust.decode([around]).encode())
    after = len(rust.decode([around, around]).encode()) - before
    texts_V: list[bytes | None] = [None] * tokenizer.vocab_size
    for token, index in rust.get_vocab(with_added_tokens=True).items():
        if index in added:
            texts_V[index] = None if added[index].special else added[index].content.encode()
        elif byte_of and byte_of.keys() >= set(token):
            texts_V[index] = bytes(byte_of[character] for character in token)
        elif _BYTE_TOKEN.fullmatch(token):
            texts_V[index] = bytes([int(token[3:5], 16)])
        else:
            whole = rust.decode([around, index, around]).encode()
            texts_V[index] = whole[before : max(len(whole) - after, before)]
    return texts_V


def _around(rust: RustTokenizer) -> int:
    ids = rust.encode("a", add_special_tokens=False).ids
    return ids[-1] if ids else 0
