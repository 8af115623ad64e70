"""Hashes the words of texts, and the word n-grams with which texts are compared.

A word is a run of letters and digits, regardless of case. In scripts without spaces, each character is a word.
Punctuation and blanks do not count.

Shape letters: C characters, W words, G n-grams, D documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

_U = np.uint64
_BASE, _STEP = _U(0x9E3779B97F4A7C15), _U(0xD6E8FEB86659FD93)
_LETTER, _SINGLE = 1, 2
# Code points from Thai to Myanmar, Khmer, kana and ideographs.
_SPACELESS_SCRIPTS = ((0x0E00, 0x10A0), (0x1780, 0x1800), (0x2E80, 0x3100), (0x31F0, 0x3200), (0x3400, 0xA000))
_IDEOGRAPHS_FROM = 0x20000


class Words(NamedTuple):
    """The words of several documents."""

    hashes_W: np.ndarray
    """uint64: hash of each word."""
    documents_W: np.ndarray
    """int64: index of each word's document, in increasing order."""
    starts_W: np.ndarray
    """int64: index of each word's first character in the lower-cased text."""


def hash_words(texts_D: Sequence[str]) -> Words:
    """Finds the words of texts, as 64-bit hashes that are the same on every machine."""
    lowered = [text.lower() for text in texts_D]
    codes_C = np.frombuffer("".join(lowered).encode("utf-32-le", "replace"), np.uint32)
    lengths_D = np.array([len(text) for text in lowered], np.int64)
    ends_D = np.cumsum(lengths_D)
    kinds_C = _character_kinds().take(codes_C)
    begins_C = np.ones(len(codes_C), bool)
    begins_C[1:] = kinds_C[:-1] != _LETTER
    begins_C[ends_D[:-1][ends_D[:-1] < len(codes_C)]] = True
    begins_C = (begins_C & (kinds_C == _LETTER)) | (kinds_C == _SINGLE)
    starts_W = np.flatnonzero(begins_C)
    if not len(starts_W):
        return Words(np.zeros(0, _U), np.zeros(0, np.int64), np.zeros(0, np.int64))
    lengths_W = np.diff(starts_W, append=len(codes_C))
    offsets_C = np.arange(starts_W[0], len(codes_C)) - np.repeat(starts_W, lengths_W)
    # A polynomial hash: each character is mixed and multiplied by a power for its position, so that all words are
    # summed at once.
    values_C = _mix_bits(codes_C[starts_W[0] :].astype(_U) + _U(1))
    values_C *= _base_powers(int(lengths_W.max()))[offsets_C]
    values_C[kinds_C[starts_W[0] :] == 0] = 0
    hashes_W = _mix_bits(np.add.reduceat(values_C, starts_W - starts_W[0]))
    documents_W = np.searchsorted(ends_D, starts_W, side="right")
    return Words(hashes_W, documents_W, starts_W - (ends_D - lengths_D)[documents_W])


def hash_ngrams(words: Words, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes every n-gram of `length` words within a document.

    Returns:
        The hashes, uint64 [G], and the index of each n-gram's first word, int64 [G].
    """
    count = len(words.hashes_W) - length + 1
    if count <= 0:
        return np.zeros(0, _U), np.zeros(0, np.int64)
    firsts_G = np.flatnonzero(words.documents_W[:count] == words.documents_W[length - 1 :])
    sums = np.zeros(count, _U)
    for offset in range(length):
        sums *= _STEP
        sums += words.hashes_W[offset : offset + count]
    return _mix_bits(sums[firsts_G]), firsts_G


def _mix_bits(x: np.ndarray) -> np.ndarray:
    """Computes the finaliser of MurmurHash3."""
    x = (x ^ (x >> _U(33))) * _U(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> _U(33))) * _U(0xC4CEB9FE1A85EC53)
    return x ^ (x >> _U(33))


def _base_powers(count: int) -> np.ndarray:
    return np.cumprod(np.full(count, _BASE)) if count > _SHORT else _short_powers()


_SHORT = 256


@lru_cache(maxsize=1)
def _short_powers() -> np.ndarray:
    return np.cumprod(np.full(_SHORT, _BASE))


@lru_cache(maxsize=1)
def _character_kinds() -> np.ndarray:
    """Returns the kind of every character (0, `_LETTER` or `_SINGLE`): uint8."""
    kinds = np.array([chr(code).isalnum() for code in range(0x110000)], np.uint8) * np.uint8(_LETTER)
    for start, stop in (*_SPACELESS_SCRIPTS, (_IDEOGRAPHS_FROM, 0x110000)):
        kinds[start:stop] *= np.uint8(_SINGLE)
    return kinds
