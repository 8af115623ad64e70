"""Spans of a text that stand verbatim in the data of a run, token by token.

Shape letters: T tokens of a piece of the stream, N tokens of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.dataset import Data

LEAST = 8
"""Tokens of the shortest span that is told."""
_PIECE = 1 << 20
_FACTOR = 0x9E3779B97F4A7C15
_BUCKET_BITS = 16
_MOST = 1000
"""Spans of a piece of the data that are compared, of texts that stand everywhere."""


class Span(NamedTuple):
    """A part of the text, and a place in the data where it stands."""

    start: int
    """Its first token in the text."""
    stop: int
    """The token after it."""
    cache: str
    first: int
    """Its first token in the stream of that cache."""


def longest_spans(
    data: Data,
    tokens: Sequence[int],
    *,
    least: int = LEAST,
    progress: Callable[[str, int, int], object] = lambda *_: None,
) -> list[Span]:
    """The longest spans of a text in the data, in the order of the text, none inside of another.

    They are compared by tokens: a span of the data that was cut into tokens in another way is not found. Of places
    with an equal span, the first is told.

    Args:
        data: complete.
        tokens: of the text.
        least: tokens of the shortest span.
        progress: told the cache, the tokens that have been searched, and all of them.
    """
    best: dict[int, Span] = {}
    text_N = np.asarray(tokens, np.int32)
    for name, cache in data.caches.items():
        for start, stop, first in _spans(
            cache.whole, text_N, least, lambda n, c=cache, m=name: progress(m, n, len(c.whole))
        ):
            known = best.get(start)
            if known is None or stop > known.stop:
                best[start] = Span(start, stop, name, first)
    found: list[Span] = []
    for span in sorted(best.values()):
        if not found or span.stop > found[-1].stop:
            found.append(span)
    return found


def _spans(
    stream: TokenStream, text_N: np.ndarray, least: int, progress: Callable[[int], object]
) -> Iterator[tuple[int, int, int]]:
    """Yields (start, stop) in the text and the place in the stream of spans that cannot be longer."""
    if len(text_N) < least:
        return
    places: dict[int, list[int]] = {}
    for at, value in enumerate(_hashes(text_N, least).tolist()):
        places.setdefault(value, []).append(at)
    # Most of the stream is passed over by a look at a few bits of each hash.
    in_text = np.zeros(1 << _BUCKET_BITS, bool)
    in_text[np.fromiter(places, np.uint64) >> np.uint64(64 - _BUCKET_BITS)] = True
    for begin in range(0, len(stream), _PIECE):
        count = min(_PIECE + least - 1, len(stream) - begin)
        if count < least:
            return
        hashes_T = _hashes(stream.read(np.array([begin]), count)[0], least)
        near = np.flatnonzero(in_text.take((hashes_T >> np.uint64(64 - _BUCKET_BITS)).astype(np.intp)))
        # Diagonal -> the end of the span that was found on it: its further places say nothing new.
        done: dict[int, int] = {}
        told = 0
        for there, value in zip(near.tolist(), hashes_T[near].tolist(), strict=True):
            for at in places.get(value, ()):
                first = begin + there
                if first < done.get(first - at, 0) or told >= _MOST:
                    continue
                start, stop, place = _extended(stream, text_N, at, first)
                done[first - at] = place + stop - start
                if stop - start >= least:
                    told += 1
                    yield start, stop, place
        progress(min(begin + _PIECE, len(stream)))


def _extended(stream: TokenStream, text_N: np.ndarray, at: int, first: int) -> tuple[int, int, int]:
    """The span around a token of the text and one of the stream in which both agree, as long as it can be."""
    low = first - min(at, first)
    high = min(first + len(text_N) - at, len(stream))
    same_T = stream.read(np.array([low]), high - low)[0] == text_N[at - (first - low) : at + (high - first)]
    middle = first - low
    if not same_T[middle]:
        return at, at, first
    before = np.flatnonzero(~same_T[:middle])
    after = np.flatnonzero(~same_T[middle:])
    left = middle - (int(before[-1]) + 1 if len(before) else 0)
    right = int(after[0]) if len(after) else len(same_T) - middle
    return at - left, at + right, first - left


def _hashes(tokens_T: np.ndarray, length: int) -> np.ndarray:
    """A hash of each run of so many tokens, uint64 [T - length + 1]."""
    count = len(tokens_T) - length + 1
    wide = tokens_T.astype(np.uint64) + np.uint64(1)
    total = np.zeros(count, np.uint64)
    for offset in range(length):
        total *= np.uint64(_FACTOR)
        total += wide[offset : offset + count]
    # The upper bits of a product depend on all of the lower ones.
    return total * np.uint64(_FACTOR)
