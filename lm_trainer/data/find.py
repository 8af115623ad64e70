"""A search for text in the tokens of a run, and the steps at which what is found is trained on.

There is no index: all tokens are read. Where a text stands, one token covers a given byte of it, the anchor; few tokens
of a vocabulary can, and only where one of them is, its neighbours are compared. So a text is found however it was cut
into tokens, also where it begins or ends inside of one.

Shape letters: V vocabulary, T tokens of a piece of the stream.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.core.piecewise import BatchSchedule
from lm_trainer.data.cache.format import token_dtype
from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.dataset import Data
from lm_trainer.data.provenance import passages_of_whole
from lm_trainer.data.rows.order import TrainOrder
from lm_trainer.data.tokenize.open_cache import OpenCache
from lm_trainer.data.tokenizer import Tokenizer

PIECE = 1 << 20
"""Tokens that are searched at a time."""
_COMPARED = 24
"""Anchors up to which comparing all tokens with each of them is faster than looking all tokens up."""
_NO_BYTE = -1
_THREADS = 2
_SAMPLED = 1 << 16
"""Tokens that say how frequent each is."""
_ANCHORS = 512
"""Bytes of a text, from its beginning, among which the anchor is chosen."""


class Match(NamedTuple):
    """An occurrence of the text in a stream of tokens."""

    first: int
    """The token in which it begins."""
    skipped: int
    """Bytes of that token before it."""
    stop: int
    """The token after the one in which it ends."""


class TrainedAt(NamedTuple):
    """A row of a batch of the run."""

    step: int
    """As metrics.jsonl counts, from 1."""
    row: int
    epoch: int
    """The epoch of the set, from 0."""


class Found(NamedTuple):
    """An occurrence of the text in a document."""

    cache: str
    """The set and the split: `train`, `validation`, or of a mixture `NAME/train`."""
    where: str
    """The document: file and line or row."""
    character: int
    """Characters of the document before it."""
    match: Match
    trained_at: tuple[TrainedAt, ...]
    """In the order of the steps; empty for what is held out or left out, or beyond the last step."""
    excluded: bool = False
    """True where `data.exclude` leaves the document out."""


class Needle:
    """A text to look for in tokens.

    Args:
        text: in UTF-8, not empty.
        texts_V: the bytes of each token; None ends every text.
        counts_V: how often each token was seen, by which the rarest anchor is chosen.
    """

    def __init__(self, text: bytes, texts_V: Sequence[bytes | None], counts_V: np.ndarray):
        self.text, self._texts_V = text, texts_V
        covering = _covering(text, texts_V)
        rarest = min(range(len(covering)), key=lambda at: sum(counts_V[token] for token in covering[at]))
        self.tokens = covering[rarest]
        """Token -> bytes of it before the beginning of the text, negative where it begins inside of it."""
        self.dtype = token_dtype(len(texts_V))
        """Of the tokens in which it is looked for: the narrower, the faster."""
        self._mask_V = np.zeros(len(texts_V), bool)
        self._mask_V[list(self.tokens)] = True
        self._first_V, self._last_V = (
            np.array([text[end] if text else _NO_BYTE for text in texts_V], np.int16) for end in (0, -1)
        )

    def search(self, tokens_T: np.ndarray, first: int, stop: int) -> list[Match]:
        """The occurrences whose anchor is one of the tokens [first, stop); places count from the first of `tokens_T`.

        Args:
            tokens_T: integers [T]; as many around those tokens as the text has bytes, as far as there are any.
            first: of those that are searched.
            stop: the one after.
        """
        part_T = tokens_T[first:stop]
        if len(self.tokens) > _COMPARED:
            is_anchor_T = self._mask_V.take(part_T)
        else:
            is_anchor_T = np.zeros(len(part_T), bool)
            for token in self.tokens:
                is_anchor_T |= part_T == token
        there = np.flatnonzero(is_anchor_T) + first
        return [match for at in self._likely(tokens_T, there).tolist() for match in self._matches(tokens_T, at)]

    def _likely(self, tokens_T: np.ndarray, there: np.ndarray) -> np.ndarray:
        """Those of some anchors whose neighbours begin and end as the text goes on: few, where the others are many."""
        anchors = tokens_T[there]
        after = self._first_V[tokens_T[np.minimum(there + 1, len(tokens_T) - 1)]]
        before = self._last_V[tokens_T[np.maximum(there - 1, 0)]]
        likely = np.zeros(len(there), bool)
        for token, places in self.tokens.items():
            length = len(self._texts_V[token] or b"")
            for place in places:
                fits = anchors == token
                if length - place < len(self.text):
                    fits &= after == self.text[length - place]
                if place < 0:
                    fits &= before == self.text[-place - 1]
                likely |= fits
        return there[likely]

    def _matches(self, tokens_T: np.ndarray, at: int) -> Iterator[Match]:
        for before in self.tokens[int(tokens_T[at])]:
            length = len(self._texts_V[int(tokens_T[at])] or b"")
            stop = self._rightwards(tokens_T, at + 1, length - before)
            start = None if stop is None else self._leftwards(tokens_T, at, before)
            if stop is not None and start is not None:
                yield Match(*start, stop)

    def _rightwards(self, tokens_T: np.ndarray, at: int, done: int) -> int | None:
        """The token after the last one of the text, whose first `done` bytes stand before `at`; None: it is another."""
        while done < len(self.text):
            text = self._texts_V[int(tokens_T[at])] if at < len(tokens_T) else None
            if not text or self.text[done : done + len(text)] != text[: len(self.text) - done]:
                return None
            done, at = done + len(text), at + 1
        return at

    def _leftwards(self, tokens_T: np.ndarray, at: int, before: int) -> tuple[int, int] | None:
        """The token in which the text begins, and its bytes before it; `before` as in `tokens`."""
        while before < 0:
            at -= 1
            text = self._texts_V[int(tokens_T[at])] if at >= 0 else None
            if not text:
                return None
            taken = min(len(text), -before)
            if text[len(text) - taken :] != self.text[-before - taken : -before]:
                return None
            before += len(text)
        return at, before


def _covering(text: bytes, texts_V: Sequence[bytes | None]) -> list[dict[int, tuple[int, ...]]]:
    """For each of the first bytes of the text the tokens that can cover it -> their bytes before the text."""
    found: list[dict[int, set[int]]] = [{} for _ in range(min(len(text), _ANCHORS))]

    def add(token: int, before: int, length: int) -> None:
        for at in range(max(-before, 0), min(length - before, len(found))):
            found[at].setdefault(token, set()).add(before)

    inside: dict[bytes, list[int]] = {}
    for token, own in enumerate(texts_V):
        if not own:
            continue
        inside.setdefault(own, []).append(token)
        # Those that reach beyond an end of the text, or hold all of it.
        for before in range(1, len(own)):
            if text.startswith(own[before:]) or own.startswith(text, before):
                add(token, before, len(own))
        for length in range(1, min(len(own), len(text) + 1)):
            if len(text) - length < len(found) and text.endswith(own[:length]):
                add(token, length - len(text), len(own))
    for start in range(len(found)):
        for length in range(1, max(map(len, inside), default=0) + 1):
            for token in inside.get(text[start : start + length], ()) if start + length <= len(text) else ():
                add(token, -start, length)
    return [{token: tuple(sorted(befores)) for token, befores in each.items()} for each in found]


def search_stream(
    stream: TokenStream, needle: Needle, progress: Callable[[int], object] = lambda _: None
) -> Iterator[Match]:
    """Yields the occurrences in a stream, in order.

    Args:
        stream: of tokens.
        needle: the text.
        progress: told how many tokens have been searched.
    """
    margin = len(needle.text) + 1

    def piece(start: int) -> list[Match]:
        low, high = max(start - margin, 0), min(start + PIECE + margin, len(stream))
        tokens_T = np.empty(high - low, needle.dtype)
        stream.copy(np.array([low]), np.array([high - low]), tokens_T, np.array([0]))
        matches = needle.search(tokens_T, start - low, min(start + PIECE, len(stream)) - low)
        return [Match(match.first + low, match.skipped, match.stop + low) for match in matches]

    with ThreadPoolExecutor(_THREADS) as pool:
        waiting: deque[tuple[int, Future[list[Match]]]] = deque()
        for start in range(0, len(stream), PIECE):
            waiting.append((start, pool.submit(piece, start)))
            if len(waiting) > 2 * _THREADS:
                yield from _take(waiting, progress)
        while waiting:
            yield from _take(waiting, progress)


def _take(waiting: deque[tuple[int, Future[list[Match]]]], progress: Callable[[int], object]) -> list[Match]:
    start, done = waiting.popleft()
    matches = done.result()
    progress(start + PIECE)
    return matches


def find_text(
    data: Data,
    text: str,
    texts_V: Sequence[bytes | None],
    progress: Callable[[str, int, int], object] = lambda *_: None,
) -> Iterator[tuple[str, Match]]:
    """Yields where a text stands: the name of a cache, and the occurrence; held-out sets are searched too.

    Args:
        data: complete.
        text: to look for.
        texts_V: of `token_texts` of the data's tokenizer.
        progress: told the cache, the tokens that have been searched, and all of them.

    Raises:
        UserError: for an empty text.
    """
    # Some tokenizers change a text (they may lower its case), and the data were changed so too.
    as_tokenised = data.tokenizer.decode(data.tokenizer.encode(text))
    if not as_tokenised:
        raise UserError("there is nothing to look for: the text is empty")
    for name, cache in data.caches.items():
        stream = cache.whole
        sample = stream.read(np.array([0]), min(len(stream), _SAMPLED))[0] if len(stream) else np.zeros(0, np.int32)
        counts_V = np.bincount(sample, minlength=len(texts_V))
        needle = Needle(as_tokenised.encode(), texts_V, counts_V)

        def report(done: int, name: str = name, total: int = len(stream)) -> None:
            progress(name, min(done, total), total)

        for match in search_stream(stream, needle, report):
            yield name, match


class Tracer:
    """Tells of occurrences in which documents they are, and when these are trained on.

    Args:
        data: of the run.
        schedule: rows of the global batch at each step.
        num_steps: of the run.
        texts_V: of `token_texts`.
    """

    def __init__(self, data: Data, schedule: BatchSchedule, num_steps: int, texts_V: Sequence[bytes | None]):
        self._data, self._schedule, self._num_steps, self._texts_V = data, schedule, num_steps, texts_V
        self._order: TrainOrder = data.order(schedule)
        self._index: Mapping[str, int] = {
            f"{train.name}/train": number for number, train in enumerate(self._order.sets)
        }

    def trace(self, name: str, match: Match) -> Found:
        """The document of an occurrence, and its steps."""
        cache = self._data.caches[name]
        (passage,) = passages_of_whole(cache, self._data.tokenizer, match.first, 1)
        character = self._characters(cache, self._data.tokenizer, match, passage.offset)
        trained = tuple(sorted(self._trained_at(name, match)))
        excluded = cache.place_of(match.first) is None
        return Found(name, passage.where, character, match, trained, excluded)

    def _trained_at(self, name: str, match: Match) -> Iterator[TrainedAt]:
        if name not in self._index:
            return
        index = self._index[name]
        train = self._order.sets[index]
        # A document is kept or left out whole, so the tokens of an occurrence stay together.
        if (first := self._data.caches[name].place_of(match.first)) is None:
            return
        rows = train.rows.rows_with(first, first + match.stop - match.first)
        stop = self._schedule.rows_before(self._num_steps)
        stop = stop if self._order.length is None else min(stop, self._order.length)
        steps = range(self._num_steps + 1)
        for position, _, epoch in self._order.positions(index, rows[rows < train.num_rows], stop):
            step = bisect.bisect_right(steps, position, key=self._schedule.rows_before) - 1
            yield TrainedAt(step + 1, position - self._schedule.rows_before(step), epoch)

    def _characters(self, cache: OpenCache, tokenizer: Tokenizer, match: Match, offset: int) -> int:
        ids = cache.whole.read(np.array([match.first - offset]), offset + 1)[0].tolist()
        texts = [self._texts_V[token] or b"" for token in ids]
        before = b"".join(texts[:-1]) + texts[-1][: match.skipped]
        # Some tokenizers put a blank before a document that is none of its text.
        added = texts[0].startswith(b" ") and not tokenizer.decode(ids[:1]).startswith(" ") and bool(before)
        return len(before.decode(errors="ignore")) - added
