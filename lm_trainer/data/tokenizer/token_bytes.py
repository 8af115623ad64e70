"""Counts the UTF-8 bytes of the text of tokens, in order to compare losses across tokenizers.

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
"""A token for a single byte in vocabularies with byte fallback."""


def count_token_bytes(tokenizer: HfTokenizer) -> np.ndarray:
    """Returns the number of UTF-8 bytes of every token's text: int32 [V]; 0 for special tokens and unused ids."""
    return np.array([len(text or b"") for text in token_texts(tokenizer)], np.int32)


def token_texts(tokenizer: HfTokenizer) -> list[bytes | None]:
    """Returns the UTF-8 bytes that every token has within a text, by id; None for special tokens and unused ids.

    The bytes of a single token may not be valid UTF-8, since a token may end inside a character.
    """
    content = tokenizer.files()[TOKENIZER_FILE].decode()
    rust = open_rust(content)
    added = rust.get_added_tokens_decoder()
    # In GPT-2's alphabet, every character encodes one byte, so tokens that end inside a character are exact.
    byte_level = "ByteLevel" in json.dumps(json.loads(content)["decoder"])
    byte_of = {character: byte for byte, character in enumerate(byte_characters())} if byte_level else {}
    # Every token is decoded between two others, since decoders treat the first token of a text differently.
    neighbour = _find_neighbour_id(rust)
    prefix_bytes = len(rust.decode([neighbour]).encode())
    suffix_bytes = len(rust.decode([neighbour, neighbour]).encode()) - prefix_bytes
    texts_V: list[bytes | None] = [None] * tokenizer.vocab_size
    for token, index in rust.get_vocab(with_added_tokens=True).items():
        if index in added:
            texts_V[index] = None if added[index].special else added[index].content.encode()
        elif byte_of and byte_of.keys() >= set(token):
            texts_V[index] = bytes(byte_of[character] for character in token)
        elif _BYTE_TOKEN.fullmatch(token):
            texts_V[index] = bytes([int(token[3:5], 16)])
        else:
            decoded = rust.decode([neighbour, index, neighbour]).encode()
            texts_V[index] = decoded[prefix_bytes : max(len(decoded) - suffix_bytes, prefix_bytes)]
    return texts_V


def _find_neighbour_id(rust: RustTokenizer) -> int:
    ids = rust.encode("a", add_special_tokens=False).ids
    return ids[-1] if ids else 0
