"""Finds spans of a text that occur verbatim, token by token, in a run's data.

Shape letters: T tokens of a piece of the stream, N tokens of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.dataset import Data

MIN_SPAN = 8
"""Minimum number of tokens of a reported span."""
_PIECE = 1 << 20
_FACTOR = 0x9E3779B97F4A7C15
_BUCKET_BITS = 16
_MAX_SPANS = 1000
"""Maximum number of spans to compare per piece of the data, for texts that occur everywhere."""


class Span(NamedTuple):
    """A span of the text, and its position in the data."""

    start: int
    """Position of its first token in the text."""
    stop: int
    """Position after its last token in the text."""
    cache: str
    first: int
    """Position of its first token in the stream of the cache."""


def longest_spans(
    data: Data,
    tokens: Sequence[int],
    *,
    min_tokens: int = MIN_SPAN,
    progress: Callable[[str, int, int], object] = lambda *_: None,
) -> list[Span]:
    """Finds the longest spans of a text in the data, in text order. No span is contained in another.

    Spans are compared by tokens, so text that was tokenised differently is not found. If a span occurs several times,
    its first occurrence is returned.

    Args:
        data: complete data of the run.
        tokens: tokens of the text.
        min_tokens: minimum number of tokens of a span.
        progress: called with the name of a cache, the number of its tokens searched so far, and their total number.
    """
    best: dict[int, Span] = {}
    text_N = np.asarray(tokens, np.int32)
    for name, cache in data.caches.items():
        for start, stop, first in _iter_spans(
            cache.whole, text_N, min_tokens, lambda n, c=cache, m=name: progress(m, n, len(c.whole))
        ):
            best_span = best.get(start)
            if best_span is None or stop > best_span.stop:
                best[start] = Span(start, stop, name, first)
    spans: list[Span] = []
    for span in sorted(best.values()):
        if not spans or span.stop > spans[-1].stop:
            spans.append(span)
    return spans


def _iter_spans(
    stream: TokenStream, text_N: np.ndarray, min_tokens: int, progress: Callable[[int], object]
) -> Iterator[tuple[int, int, int]]:
    """Yields the start and stop in the text, and the position in the stream, of each maximal span."""
    if len(text_N) < min_tokens:
        return
    text_indices: dict[int, list[int]] = {}
    for text_index, value in enumerate(_hash_runs(text_N, min_tokens).tolist()):
        text_indices.setdefault(value, []).append(text_index)
    # A few bits of the hash suffice to skip most of the stream.
    in_text = np.zeros(1 << _BUCKET_BITS, bool)
    in_text[np.fromiter(text_indices, np.uint64) >> np.uint64(64 - _BUCKET_BITS)] = True
    for begin in range(0, len(stream), _PIECE):
        count = min(_PIECE + min_tokens - 1, len(stream) - begin)
        if count < min_tokens:
            return
        hashes_T = _hash_runs(stream.read(np.array([begin]), count)[0], min_tokens)
        near = np.flatnonzero(in_text.take((hashes_T >> np.uint64(64 - _BUCKET_BITS)).astype(np.intp)))
        # Maps a diagonal to the end of the last span found on it. Matches before this end belong to the same span.
        done: dict[int, int] = {}
        num_spans = 0
        for offset, value in zip(near.tolist(), hashes_T[near].tolist(), strict=True):
            for text_index in text_indices.get(value, ()):
                first = begin + offset
                if first < done.get(first - text_index, 0) or num_spans >= _MAX_SPANS:
                    continue
                start, stop, stream_start = _extend_match(stream, text_N, text_index, first)
                done[first - text_index] = stream_start + stop - start
                if stop - start >= min_tokens:
                    num_spans += 1
                    yield start, stop, stream_start
        progress(min(begin + _PIECE, len(stream)))


def _extend_match(stream: TokenStream, text_N: np.ndarray, text_index: int, first: int) -> tuple[int, int, int]:
    """Extends a match of one token in both directions as far as the text and the stream agree."""
    low = first - min(text_index, first)
    high = min(first + len(text_N) - text_index, len(stream))
    same_T = (
        stream.read(np.array([low]), high - low)[0] == text_N[text_index - (first - low) : text_index + (high - first)]
    )
    middle = first - low
    if not same_T[middle]:
        return text_index, text_index, first
    mismatches_before = np.flatnonzero(~same_T[:middle])
    mismatches_after = np.flatnonzero(~same_T[middle:])
    left = middle - (int(mismatches_before[-1]) + 1 if len(mismatches_before) else 0)
    right = int(mismatches_after[0]) if len(mismatches_after) else len(same_T) - middle
    return text_index - left, text_index + right, first - left


def _hash_runs(tokens_T: np.ndarray, length: int) -> np.ndarray:
    """Returns a hash of each run of `length` tokens: uint64 [T - length + 1]."""
    count = len(tokens_T) - length + 1
    wide = tokens_T.astype(np.uint64) + np.uint64(1)
    total = np.zeros(count, np.uint64)
    for offset in range(length):
        total *= np.uint64(_FACTOR)
        total += wide[offset : offset + count]
    # The upper bits of a product depend on all lower bits.
    return total * np.uint64(_FACTOR)
