"""Finds text in the tokens of a run, and the steps that train on it.

The search needs no index and reads all tokens. In each occurrence, some token covers a given byte of the text, the
anchor. Only a few tokens of the vocabulary can cover this byte, and only at these tokens are the neighbours compared.
Thus the search finds a text regardless of how it was tokenised, even if it begins or ends within a token.

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
from lm_trainer.data.provenance import iter_full_stream_passages
from lm_trainer.data.rows.order import TrainOrder
from lm_trainer.data.tokenize.open_cache import OpenCache
from lm_trainer.data.tokenizer import Tokenizer

PIECE = 1 << 20
"""Number of tokens per search task."""
_MAX_COMPARED = 24
"""Maximum number of anchor tokens for which comparing all tokens with each of them is faster than a table lookup."""
_NO_BYTE = -1
_THREADS = 2
_SAMPLE_TOKENS = 1 << 16
"""Number of tokens to sample for estimating token frequencies."""
_MAX_ANCHORS = 512
"""Number of bytes at the beginning of the text among which the anchor is chosen."""


class Match(NamedTuple):
    """An occurrence of the text in a stream of tokens."""

    first: int
    """Position of the token that contains the first byte of the text."""
    skipped: int
    """Number of bytes of this token before the occurrence."""
    stop: int
    """Position after the last token of the occurrence."""


class TrainedAt(NamedTuple):
    """A row of one of the run's batches that contains an occurrence."""

    step: int
    """Number of the step, counted from 1 as in metrics.jsonl."""
    row: int
    epoch: int
    """Epoch of the set, counted from 0."""


class Occurrence(NamedTuple):
    """An occurrence of the text in a document."""

    cache: str
    """The set and the split: `train` or `validation`; in a mixture, `NAME/train` or `NAME/validation`."""
    where: str
    """Origin of the document: its file, and its line or row."""
    character: int
    """Number of characters of the document before the occurrence."""
    match: Match
    trained_at: tuple[TrainedAt, ...]
    """The rows that train on it, in step order. Empty for held-out and excluded documents, and beyond the last step."""
    excluded: bool = False
    """True if `data.exclude` leaves the document out."""
    document: int = 0
    """Number of the document in its cache, counted from 0."""
    counts: bool = True
    """False if `data.without` makes the document not count: its rows are read, but not its tokens."""


class Needle:
    """A text to look for in tokens.

    Args:
        text: the text in UTF-8, not empty.
        texts_V: the bytes of each token; None for tokens that end every text.
        counts_V: frequency of each token, with which the rarest anchor is chosen.
    """

    def __init__(self, text: bytes, texts_V: Sequence[bytes | None], counts_V: np.ndarray):
        self.text, self._texts_V = text, texts_V
        covering = _covering_tokens(text, texts_V)
        rarest = min(range(len(covering)), key=lambda position: sum(counts_V[token] for token in covering[position]))
        self.tokens = covering[rarest]
        """Maps tokens to offsets of the text's beginning within them; negative if the text begins earlier."""
        self.dtype = token_dtype(len(texts_V))
        """Dtype of the tokens to search. A narrower dtype makes the search faster."""
        self._mask_V = np.zeros(len(texts_V), bool)
        self._mask_V[list(self.tokens)] = True
        self._first_V, self._last_V = (
            np.array([text[end] if text else _NO_BYTE for text in texts_V], np.int16) for end in (0, -1)
        )

    def search(self, tokens_T: np.ndarray, first: int, stop: int) -> list[Match]:
        """Returns the occurrences whose anchor is in the tokens [first, stop).

        All indices count from the beginning of `tokens_T`.

        Args:
            tokens_T: integers [T], including as many tokens on either side of the range as the text has bytes, if they
                exist.
            first: first token to search.
            stop: exclusive end of the tokens to search.
        """
        part_T = tokens_T[first:stop]
        if len(self.tokens) > _MAX_COMPARED:
            is_anchor_T = self._mask_V.take(part_T)
        else:
            is_anchor_T = np.zeros(len(part_T), bool)
            for token in self.tokens:
                is_anchor_T |= part_T == token
        anchors = np.flatnonzero(is_anchor_T) + first
        return [
            match
            for position in self._filter_anchors(tokens_T, anchors).tolist()
            for match in self._iter_matches(tokens_T, position)
        ]

    def _filter_anchors(self, tokens_T: np.ndarray, anchors: np.ndarray) -> np.ndarray:
        """Returns the anchors whose neighbours match the adjacent bytes of the text, which few of them do."""
        anchor_tokens = tokens_T[anchors]
        next_bytes = self._first_V[tokens_T[np.minimum(anchors + 1, len(tokens_T) - 1)]]
        previous_bytes = self._last_V[tokens_T[np.maximum(anchors - 1, 0)]]
        likely = np.zeros(len(anchors), bool)
        for token, offsets in self.tokens.items():
            length = len(self._texts_V[token] or b"")
            for offset in offsets:
                fits = anchor_tokens == token
                if length - offset < len(self.text):
                    fits &= next_bytes == self.text[length - offset]
                if offset < 0:
                    fits &= previous_bytes == self.text[-offset - 1]
                likely |= fits
        return anchors[likely]

    def _iter_matches(self, tokens_T: np.ndarray, position: int) -> Iterator[Match]:
        for offset in self.tokens[int(tokens_T[position])]:
            length = len(self._texts_V[int(tokens_T[position])] or b"")
            stop = self._match_right(tokens_T, position + 1, length - offset)
            start = None if stop is None else self._match_left(tokens_T, position, offset)
            if stop is not None and start is not None:
                yield Match(*start, stop)

    def _match_right(self, tokens_T: np.ndarray, position: int, done: int) -> int | None:
        """Returns the index after the last token of the text; None if the text differs.

        The first `done` bytes of the text precede `position`.
        """
        while done < len(self.text):
            text = self._texts_V[int(tokens_T[position])] if position < len(tokens_T) else None
            if not text or self.text[done : done + len(text)] != text[: len(self.text) - done]:
                return None
            done, position = done + len(text), position + 1
        return position

    def _match_left(self, tokens_T: np.ndarray, position: int, offset: int) -> tuple[int, int] | None:
        """Returns the index of the token in which the text begins, and the number of its bytes before the text.

        `offset` is a value of `tokens`.
        """
        while offset < 0:
            position -= 1
            text = self._texts_V[int(tokens_T[position])] if position >= 0 else None
            if not text:
                return None
            overlap = min(len(text), -offset)
            if text[len(text) - overlap :] != self.text[-offset - overlap : -offset]:
                return None
            offset += len(text)
        return position, offset


def _covering_tokens(text: bytes, texts_V: Sequence[bytes | None]) -> list[dict[int, tuple[int, ...]]]:
    """Maps, for each of the text's first bytes, the tokens that can cover it to their bytes before the text."""
    candidates: list[dict[int, set[int]]] = [{} for _ in range(min(len(text), _MAX_ANCHORS))]

    def add_candidate(token: int, offset: int, length: int) -> None:
        for position in range(max(-offset, 0), min(length - offset, len(candidates))):
            candidates[position].setdefault(token, set()).add(offset)

    inside: dict[bytes, list[int]] = {}
    for token, token_text in enumerate(texts_V):
        if not token_text:
            continue
        inside.setdefault(token_text, []).append(token)
        # Tokens that extend beyond an end of the text, or contain all of it.
        for offset in range(1, len(token_text)):
            if text.startswith(token_text[offset:]) or token_text.startswith(text, offset):
                add_candidate(token, offset, len(token_text))
        for length in range(1, min(len(token_text), len(text) + 1)):
            if len(text) - length < len(candidates) and text.endswith(token_text[:length]):
                add_candidate(token, length - len(text), len(token_text))
    for start in range(len(candidates)):
        for length in range(1, max(map(len, inside), default=0) + 1):
            for token in inside.get(text[start : start + length], ()) if start + length <= len(text) else ():
                add_candidate(token, -start, length)
    return [
        {token: tuple(sorted(offsets)) for token, offsets in offsets_by_token.items()}
        for offsets_by_token in candidates
    ]


def search_stream(
    stream: TokenStream, needle: Needle, progress: Callable[[int], object] = lambda _: None
) -> Iterator[Match]:
    """Yields the occurrences in a stream, in order.

    Args:
        stream: stream of tokens.
        needle: the text.
        progress: called with the number of tokens searched so far.
    """
    margin = len(needle.text) + 1

    def search_piece(start: int) -> list[Match]:
        low, high = max(start - margin, 0), min(start + PIECE + margin, len(stream))
        tokens_T = np.empty(high - low, needle.dtype)
        stream.copy(np.array([low]), np.array([high - low]), tokens_T, np.array([0]))
        matches = needle.search(tokens_T, start - low, min(start + PIECE, len(stream)) - low)
        return [Match(match.first + low, match.skipped, match.stop + low) for match in matches]

    with ThreadPoolExecutor(_THREADS) as pool:
        pending: deque[tuple[int, Future[list[Match]]]] = deque()
        for start in range(0, len(stream), PIECE):
            pending.append((start, pool.submit(search_piece, start)))
            if len(pending) > 2 * _THREADS:
                yield from _pop_done(pending, progress)
        while pending:
            yield from _pop_done(pending, progress)


def _pop_done(pending: deque[tuple[int, Future[list[Match]]]], progress: Callable[[int], object]) -> list[Match]:
    start, done = pending.popleft()
    matches = done.result()
    progress(start + PIECE)
    return matches


def find_text(
    data: Data,
    text: str,
    texts_V: Sequence[bytes | None],
    progress: Callable[[str, int, int], object] = lambda *_: None,
) -> Iterator[tuple[str, Match]]:
    """Yields the name of the cache and the match for each occurrence of a text, including in held-out sets.

    Args:
        data: complete data of the run.
        text: the text to look for.
        texts_V: text of each token, from `token_texts` of the data's tokenizer.
        progress: called with the name of a cache, the number of its tokens searched so far, and their total number.

    Raises:
        UserError: if the text is empty.
    """
    # Some tokenizers normalise text (for example to lower case), and the data were normalised in the same way.
    as_tokenised = data.tokenizer.decode(data.tokenizer.encode(text))
    if not as_tokenised:
        raise UserError("there is nothing to look for: the text is empty")
    for name, cache in data.caches.items():
        stream = cache.whole
        sample = (
            stream.read(np.array([0]), min(len(stream), _SAMPLE_TOKENS))[0] if len(stream) else np.zeros(0, np.int32)
        )
        counts_V = np.bincount(sample, minlength=len(texts_V))
        needle = Needle(as_tokenised.encode(), texts_V, counts_V)

        def report(done: int, name: str = name, total: int = len(stream)) -> None:
            progress(name, min(done, total), total)

        for match in search_stream(stream, needle, report):
            yield name, match


class Tracer:
    """Finds the document of each occurrence, and the steps that train on it.

    Args:
        data: data of the run.
        schedule: number of rows of the global batch at each step.
        num_steps: number of steps of the run.
        texts_V: text of each token, from `token_texts`.
    """

    def __init__(self, data: Data, schedule: BatchSchedule, num_steps: int, texts_V: Sequence[bytes | None]):
        self._data, self._schedule, self._num_steps, self._texts_V = data, schedule, num_steps, texts_V
        self._order: TrainOrder = data.train_order(schedule)
        self._index: Mapping[str, int] = {
            f"{train.name}/train": number for number, train in enumerate(self._order.sets)
        }

    def trace(self, name: str, match: Match) -> Occurrence:
        """Returns the occurrence with its document and the steps that train on it."""
        cache = self._data.caches[name]
        (passage,) = iter_full_stream_passages(cache, self._data.tokenizer, match.first, 1)
        character = self._char_offset(cache, self._data.tokenizer, match, passage.offset)
        counts = self._data.counts(name, passage.document)
        trained = tuple(sorted(self._iter_training_steps(name, match))) if counts else ()
        excluded = cache.position_of(match.first) is None
        return Occurrence(name, passage.where, character, match, trained, excluded, passage.document, counts)

    def _iter_training_steps(self, name: str, match: Match) -> Iterator[TrainedAt]:
        if name not in self._index:
            return
        index = self._index[name]
        train = self._order.sets[index]
        # Documents are retained or excluded as a unit, so the tokens of an occurrence stay together.
        if (first := self._data.caches[name].position_of(match.first)) is None:
            return
        rows = train.rows.rows_containing(first, first + match.stop - match.first)
        stop = self._schedule.rows_before(self._num_steps)
        stop = stop if self._order.length is None else min(stop, self._order.length)
        steps = range(self._num_steps + 1)
        for position, _, epoch in self._order.find_positions(index, rows[rows < train.num_rows], stop):
            step = bisect.bisect_right(steps, position, key=self._schedule.rows_before) - 1
            yield TrainedAt(step + 1, position - self._schedule.rows_before(step), epoch)

    def _char_offset(self, cache: OpenCache, tokenizer: Tokenizer, match: Match, offset: int) -> int:
        ids = cache.whole.read(np.array([match.first - offset]), offset + 1)[0].tolist()
        texts = [self._texts_V[token] or b"" for token in ids]
        prefix = b"".join(texts[:-1]) + texts[-1][: match.skipped]
        # Some tokenizers put a blank before a document, which is not part of the text.
        added = texts[0].startswith(b" ") and not tokenizer.decode(ids[:1]).startswith(" ") and bool(prefix)
        return len(prefix.decode(errors="ignore")) - added
