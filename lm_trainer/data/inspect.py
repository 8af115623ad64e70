"""What is in the caches of a configuration: how far they are, whether they are whole, and what they hold.

Shape letters: D documents.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.data.cache.documents import begin_of, document_lengths, read_lengths
from lm_trainer.data.cache.format import BUILDER, MANIFEST, Ledger, fingerprint, part_key, read_record, token_dtype
from lm_trainer.data.cache.kvstore import Store
from lm_trainer.data.cache.loss_mask import LEARN, MarkStream
from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.config import DataConfig
from lm_trainer.data.rows.packing import PackingStats, packing_stats
from lm_trainer.data.tokenize.build import Build
from lm_trainer.data.tokenize.plan import Place, find_caches, find_misfits, open_builds
from lm_trainer.data.trace import where


@dataclass(frozen=True)
class CacheStatus:
    """How far one cache is."""

    name: str
    """`train` or `validation`, with the name of the set before it in a mixture."""
    url: str
    fingerprint: str | None
    """Of the manifest; None where there is no cache yet."""
    ledger: Ledger
    num_shards: int
    builder: str | None
    """Who builds it, and when it was last heard of."""
    misfit: str | None
    """Why training would refuse it, if it would."""

    @property
    def begun(self) -> bool:
        return self.fingerprint is not None or self.ledger.begun

    def __str__(self) -> str:
        ledger = self.ledger
        if not self.begun:
            return f"{self.name}: not begun ({self.url})"
        state = "finished" if ledger.finished else f"{ledger.next[0]} of {self.num_shards} shards done"
        bad = f", {ledger.bad} bad rows left out" if ledger.bad else ""
        by = f", {self.builder} builds it" if self.builder else ""
        return (
            f"{self.name}: {state}; {len(ledger.parts)} parts, {ledger.num_documents:,} documents, "
            f"{ledger.num_tokens:,} tokens of {sum(ledger.text_bytes) / 1e6:,.1f} MB{bad}{by} "
            f"({self.url}, {self.fingerprint or 'no manifest'})"
        )


def status(config: DataConfig) -> list[CacheStatus]:
    """How far each cache is, and whether it fits the configuration; reads no text and changes nothing."""
    directory, places = find_caches(config)
    misfits = find_misfits(config, directory, places)
    return [_status(place, misfits.get(name)) for name, place in places.items()]


def _status(place: Place, misfit: str | None) -> CacheStatus:
    store = Store(place.url)
    manifest, builder = store.read_json(MANIFEST), store.read_json(BUILDER)
    who = None
    if builder is not None:
        who = f"process {builder['pid']} of {builder['host']}, seen {time.time() - builder['beat']:.0f} s ago,"
    found = None if manifest is None else fingerprint(manifest)
    return CacheStatus(place.title, store.url, found, Ledger.read(store), len(place.shards), who, misfit)


def verify(store: Store, ledger: Ledger) -> list[str]:
    """Reads every file of a cache and compares it with its record; what is wrong, one line for each file."""
    wrong = []
    for name, tokens in zip(ledger.parts, ledger.tokens, strict=True):
        try:
            record = read_record(store, name)
        except UserError:
            wrong.append(f"{store.url}/{part_key(name, 'json')} is damaged")
            continue
        if record is None:
            wrong.append(f"{store.url}/{part_key(name, 'json')} is missing")
            continue
        if record["tokens"] != tokens:
            wrong.append(f"{store.url}/{part_key(name, 'json')} says {record['tokens']} tokens, the ledger {tokens}")
        wrong += [problem for kind, blob in record["blobs"].items() if (problem := _compare(store, name, kind, blob))]
    return wrong


def _compare(store: Store, name: str, kind: str, blob: dict[str, Any]) -> str | None:
    key = part_key(name, kind)
    content = store.read(key)
    if content is None:
        return f"{store.url}/{key} is missing"
    if len(content) != blob["bytes"]:
        return f"{store.url}/{key} has {len(content)} bytes, {blob['bytes']} were written"
    if hashlib.sha256(content).hexdigest() != blob["sha256"]:
        return f"{store.url}/{key} has changed since it was written"
    return None


class CacheStats(NamedTuple):
    """What the documents of a cache are like."""

    documents: int
    tokens: int
    text_bytes: int
    quantiles: dict[str, int]
    """Tokens of a document, end included: the least, the median, ..."""
    packing: dict[str, PackingStats]


def stats(store: Store, ledger: Ledger, seq_len: int) -> CacheStats:
    """Lengths of documents, and how well they fill rows of `seq_len`.

    Raises:
        UserError: if nothing has been built yet.
    """
    lengths_D = document_lengths(store, ledger)
    if not len(lengths_D):
        raise UserError(f"{store.url} holds no documents yet; run: lmt data build")
    points = {"least": 0, "5 %": 5, "median": 50, "95 %": 95, "most": 100}
    quantiles = {name: int(np.percentile(lengths_D, point)) for name, point in points.items()}
    text_bytes = sum(ledger.text_bytes)
    targets = partial(_targets, store, ledger, lengths_D) if ledger.marks else None
    packing = packing_stats(lengths_D, seq_len, targets)
    return CacheStats(len(lengths_D), ledger.num_tokens, text_bytes, quantiles, packing)


def _targets(store: Store, ledger: Ledger, lengths_D: np.ndarray, count: int) -> int:
    """How many of the first `count` tokens are learnt and follow another token of their document."""
    marks, starts_D = MarkStream(store, ledger, np.dtype(np.uint8)), np.cumsum(lengths_D) - lengths_D
    found = begin = 0
    for tokens in ledger.tokens:
        end = min(begin + tokens, count)
        if end <= begin:
            break
        learnt = (marks.read(np.array([begin]), end - begin)[0] & LEARN) != 0
        firsts = starts_D[np.searchsorted(starts_D, begin) : np.searchsorted(starts_D, end)] - begin
        found, begin = found + int(learnt.sum()) - int(learnt[firsts].sum()), end
    return found


class Shown(NamedTuple):
    """A document as the cache holds it."""

    number: int
    where: str
    """Where it came from: the file and the line or row."""
    tokens: int
    learnt: int
    """How many of them the loss counts."""
    text: str
    """All of it, or its beginning: more than so many characters as were asked for. Where the cache says which tokens
    are learnt, these stand between `⟦` and `⟧`."""


def inspect(config: DataConfig, name: str, first: int, count: int, chars: int = 0) -> Iterator[Shown]:
    """Some documents of a built cache, as the model sees them.

    Args:
        config: what was built.
        name: `NAME/train` or `NAME/validation`; `train` and `validation` where there is one set.
        first: number of the first document.
        count: how many.
        chars: how much of its text will be looked at; 0: all.

    Raises:
        UserError: for a cache that does not exist, does not fit the configuration, or has no such document.
    """
    directory, places = find_caches(config)
    name = full_name(places, name)
    if not places[name].begun:
        raise UserError(f"{places[name].url} is not built yet; run: lmt data build")
    build = open_builds(config, directory, places)[name]
    ledger = build.look()
    if first >= ledger.num_documents:
        so_far = "" if ledger.finished else " so far; lmt data build goes on with it"
        raise UserError(f"there is no document {first}: {build.store.url} holds {ledger.num_documents}{so_far}")
    documents = _Documents(build, ledger, chars)
    for number in range(first, min(first + count, ledger.num_documents)):
        yield documents[number]


class _Documents:
    """The documents of a cache by their numbers, each whole, though it may begin in an earlier part than it ends in."""

    def __init__(self, build: Build, ledger: Ledger, chars: int):
        self._build, self._ledger, self._chars = build, ledger, chars
        self._ended = np.cumsum(ledger.documents)
        self._tokens = TokenStream(build.store, ledger, token_dtype(build.tokenizer.vocab_size))
        self._marks = MarkStream(build.store, ledger, np.dtype(np.uint8)) if ledger.marks else None

    def __getitem__(self, number: int) -> Shown:
        store, ledger = self._build.store, self._ledger
        part = int(np.searchsorted(self._ended, number, side="right"))
        index = number - (int(self._ended[part - 1]) if part else 0)
        lengths = read_lengths(store, ledger, part)
        start, length = sum(ledger.tokens[:part]) + int(lengths[:index].sum()), int(lengths[index])
        if index == 0:
            first, before = begin_of(store, ledger, part)
            if first != part:
                part, index = first, len(read_lengths(store, ledger, first)) - 1
            start, length = start - before, length + before
        learn = None
        if self._marks is not None:
            learn = (self._marks.read(np.array([start]), length)[0] & LEARN) != 0
        source = where(store, ledger, self._build.shards, part, index)
        return Shown(
            number, source, length, length if learn is None else int(learn.sum()), self._text(start, length, learn)
        )

    def _text(self, start: int, length: int, learn: np.ndarray | None) -> str:
        """More characters than are asked for, where there are more: a document may be larger than memory."""
        count = 8 * self._chars if self._chars else length
        while True:
            ids = self._tokens.read(np.array([start]), min(count, length))[0]
            text = self._decode(ids) if learn is None else self._with_marks(ids, learn[:count])
            if count >= length or len(text) > self._chars:
                return text
            count *= 8

    def _decode(self, ids: np.ndarray) -> str:
        return self._build.tokenizer.decode(ids.tolist())

    def _with_marks(self, ids: np.ndarray, learn: np.ndarray) -> str:
        changes = np.flatnonzero(np.diff(learn)) + 1
        texts = [self._decode(run) for run in np.split(ids, changes)]
        learnt = [learn[place] for place in [0, *changes.tolist()]]
        return "".join(f"⟦{text}⟧" if marked else text for text, marked in zip(texts, learnt, strict=True))


def full_name(names: Collection[str], name: str) -> str:
    """The name of a cache: `train` means that of the only set.

    Raises:
        UserError: naming those that exist.
    """
    for known in names:
        if name in (known, known.partition("/")[2] if len({k.partition("/")[0] for k in names}) == 1 else known):
            return known
    raise UserError(f"there is no cache {name}; there are: {', '.join(names)}")
