"""Inspection of caches: how far they are, whether their files are whole, and the documents that they hold.

Shape letters: D documents, T tokens of a document.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.data.cache.checksums import is_intact
from lm_trainer.data.cache.documents import begin_of, document_lengths, read_lengths
from lm_trainer.data.cache.exclusion import Exclusion
from lm_trainer.data.cache.format import (
    BUILDER,
    LEDGER,
    fingerprint,
    part_key,
    read_manifest,
    read_record,
    shard_key,
    token_dtype,
)
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.cache.loss_mask import IN_LOSS, LossMaskStream
from lm_trainer.data.cache.token_place import TokenPlace
from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.config import DataConfig
from lm_trainer.data.provenance import source_of
from lm_trainer.data.rows.packing import PackingStats, packing_stats
from lm_trainer.data.tokenize.build import Build
from lm_trainer.data.tokenize.cache_spec import CacheSpec, find_caches
from lm_trainer.data.tokenize.finished_cache import FinishedCache
from lm_trainer.data.tokenize.lock import parsed_claim
from lm_trainer.data.tokenize.plan import find_misfits, open_builds
from lm_trainer.data.tokenize.ready_rows import ReadyRows


class KeptFeatures(NamedTuple):
    """The features that a model hears with each document of a cache."""

    frames: int
    channels: int
    kept: bool
    """False if they are made anew for every batch."""

    def of(self, documents: int) -> str:
        """Describes those of some documents, such as `features of 3000 x 80 (1.9 MB)`."""
        # Numbers of four bytes.
        size = f"{4 * self.frames * self.channels * documents / 1e6:,.1f} MB" if self.kept else "made on the fly"
        return f"features of {self.frames} x {self.channels} ({size})"


@dataclass(frozen=True)
class CacheStatus:
    """State of one cache."""

    name: str
    """`train` or `validation`, with the name of the set before it in a mixture."""
    url: str
    fingerprint: str | None
    """The fingerprint of the manifest; None where there is no cache yet."""
    ledger: Ledger
    num_shards: int
    builder: str | None
    """The process that builds it, and the time since its last heartbeat."""
    misfit: str | None
    """The reason for which training would refuse it, if it would."""
    key: str = ""
    """`NAME/train` or `NAME/validation`."""
    features: KeptFeatures | None = None
    """None for text alone."""
    prebuilt: bool = False
    """True for a cache that was built elsewhere, and is only read here."""

    @property
    def begun(self) -> bool:
        """True if anything was built, even if the manifest is lost."""
        return self.fingerprint is not None or self.ledger.begun

    def __str__(self) -> str:
        ledger = self.ledger
        if not self.begun:
            return f"{self.name}: not begun ({self.url})"
        state = "finished" if ledger.finished else f"{ledger.next[0]} of {self.num_shards} shards done"
        bad = f", {ledger.bad} bad rows left out" if ledger.bad else ""
        heard = f", {self.features.of(ledger.num_documents)}" if self.features else ""
        by = f", {self.builder} builds it" if self.builder else ""
        return (
            f"{self.name}: {state}; {len(ledger.parts)} parts, {ledger.num_documents:,} documents, "
            f"{ledger.num_tokens:,} tokens of {sum(ledger.text_bytes) / 1e6:,.1f} MB{heard}{bad}{by} "
            f"({self.url}, {self.fingerprint or 'no manifest'})"
        )


def status(config: DataConfig) -> list[CacheStatus]:
    """Returns the state of each cache, and tells if it fits the configuration; reads no text and changes nothing."""
    directory, caches = find_caches(config)
    misfits = find_misfits(config, directory, caches)
    return [_status(name, cache, misfits.get(name)) for name, cache in caches.items()]


def _status(name: str, cache: CacheSpec, misfit: str | None) -> CacheStatus:
    store = KvStore(cache.url)
    manifest, builder = read_manifest(store), parsed_claim(store.read(BUILDER))
    who = None
    if builder is not None:
        who = f"process {builder['pid']} of {builder['host']}, seen {time.time() - builder['beat']:.0f} s ago,"
    found = None if manifest is None else fingerprint(manifest)
    format = cache.config.format
    features = None if format.features_shape is None else KeptFeatures(*format.features_shape, format.keeps_features)
    ledger = Ledger.read(store)
    shards = len(cache.shards)
    return CacheStatus(cache.title, store.url, found, ledger, shards, who, misfit, name, features, cache.prebuilt)


def verify(store: KvStore, ledger: Ledger) -> list[str]:
    """Reads every file of a cache and compares it with its record; returns one line for each file that is wrong."""
    return [line for lines in damaged_parts(store, ledger).values() for line in lines]


def damaged_parts(store: KvStore, ledger: Ledger) -> dict[int, list[str]]:
    """Reads every file of a cache as `verify`; returns the lines of each part that has any, by its number."""
    lines = {part: _problems(store, ledger, part) for part in range(len(ledger.parts))}
    return {part: problems for part, problems in lines.items() if problems}


def remove_parts(store: KvStore, ledger: Ledger, parts: Collection[int]) -> int:
    """Removes parts by their numbers, so that a build makes them again; returns how many these are.

    A build begins with the first part of a shard that is missing, and its bytes are those that were written before.
    """
    for part in parts:
        name = ledger.parts[part]
        store.delete(shard_key(int(name.partition("-")[0])))
        store.delete(part_key(name, "json"))
    if parts:
        # The next builder takes the parts in again that are there.
        store.delete(LEDGER)
    return len(parts)


def _problems(store: KvStore, ledger: Ledger, part: int) -> list[str]:
    name = ledger.parts[part]
    try:
        record = read_record(store, name)
    except UserError:
        return [f"{store.url}/{part_key(name, 'json')} is damaged"]
    if record is None:
        return [f"{store.url}/{part_key(name, 'json')} is missing"]
    if not ledger.fits(part, record):
        return [f"{store.url}/{part_key(name, 'json')} does not fit {LEDGER}"]
    wrong = [problem for kind, blob in record["blobs"].items() if (problem := _compare(store, name, kind, blob))]
    if (place := record.get("place")) is not None:
        wrong += _compare_place(place, ledger.tokens[part])
    return wrong


def _compare_place(record: dict[str, Any], count: int) -> list[str]:
    place = TokenPlace(*(record[name] for name in TokenPlace._fields))
    try:
        content = np.ascontiguousarray(place.open(count)[0:count])
    except MachineError as error:
        return [str(error)]
    return [] if is_intact(content, record) else [f"{place.path} has changed since it was indexed"]


def _compare(store: KvStore, name: str, kind: str, blob: dict[str, Any]) -> str | None:
    key = part_key(name, kind)
    content = store.read(key, seconds=store.deadline_for(blob["bytes"]))
    if content is None:
        return f"{store.url}/{key} is missing"
    if len(content) != blob["bytes"]:
        return f"{store.url}/{key} has {len(content)} bytes, {blob['bytes']} were written"
    if not is_intact(content, blob):
        return f"{store.url}/{key} has changed since it was written"
    return None


class CacheStats(NamedTuple):
    """Lengths of the documents of a cache, and how well they fill rows."""

    documents: int
    tokens: int
    bytes_per_token: float | None
    """Bytes of the text in UTF-8; None where the tokens were made elsewhere."""
    quantiles: dict[str, int]
    """Tokens of a document, end included: the least, the median, ..."""
    packing: dict[str, PackingStats]
    left_out: int
    """Documents that `data.exclude` leaves out, and that the other figures are without."""
    left_out_tokens: int


def stats(store: KvStore, ledger: Ledger, seq_len: int | None, exclusion: Exclusion | None = None) -> CacheStats:
    """Computes the lengths of documents, and how well they fill rows of `seq_len`; without those that are left out.

    Without `seq_len` each is a row by itself, and there is nothing to pack.

    Raises:
        UserError: if nothing has been built yet.
    """
    lengths_D = document_lengths(store, ledger)
    if not len(lengths_D):
        raise UserError(f"{store.url} holds no documents yet; run: lmt data build")
    left_out = np.zeros(0, np.int64)
    if exclusion is not None:
        exclusion.check(store.url, ledger, len(lengths_D))
        left_out = lengths_D[exclusion.documents_N]
        lengths_D = np.delete(lengths_D, exclusion.documents_N)
    points = {"least": 0, "5 %": 5, "median": 50, "95 %": 95, "most": 100}
    quantiles = {name: int(np.percentile(lengths_D, point)) for name, point in points.items()}
    # The loss mask is counted over the whole stream, so not where documents of it are left out.
    masked = ledger.marks and not len(left_out)
    count_targets = partial(_num_targets, store, ledger, lengths_D) if masked else None
    packing = {} if seq_len is None else packing_stats(lengths_D, seq_len, count_targets)
    per_token = None if ledger.places else sum(ledger.text_bytes) / ledger.num_tokens
    return CacheStats(
        len(lengths_D), int(lengths_D.sum()), per_token, quantiles, packing, len(left_out), int(left_out.sum())
    )


def _num_targets(store: KvStore, ledger: Ledger, lengths_D: np.ndarray, count: int) -> int:
    """Counts those of the first `count` tokens that the loss counts and that follow another token of their document."""
    mask, starts_D = LossMaskStream(store, ledger, np.dtype(np.uint8)), np.cumsum(lengths_D) - lengths_D
    found = begin = 0
    # Part by part: the whole mask may be larger than the memory of the machine.
    for tokens in ledger.tokens:
        end = min(begin + tokens, count)
        if end <= begin:
            break
        in_loss_T = (mask.read(np.array([begin]), end - begin)[0] & IN_LOSS) != 0
        firsts = starts_D[np.searchsorted(starts_D, begin) : np.searchsorted(starts_D, end)] - begin
        found, begin = found + int(in_loss_T.sum()) - int(in_loss_T[firsts].sum()), end
    return found


class ShownDocument(NamedTuple):
    """A document as the cache holds it."""

    number: int
    where: str
    """Its origin: the file and the line or row."""
    tokens: int
    in_loss: int
    """Tokens that the loss counts."""
    text: str
    """The text, or a beginning of it that is longer than was asked for. Where the cache has a loss mask, the tokens
    that the loss counts stand between `⟦` and `⟧`."""


def inspect(config: DataConfig, name: str, first: int, count: int, chars: int = 0) -> Iterator[ShownDocument]:
    """Yields some documents of a built cache, as the model sees them.

    Args:
        config: the `data` section that built it.
        name: `NAME/train` or `NAME/validation`; `train` and `validation` where there is one set.
        first: number of the first document.
        count: how many.
        chars: characters of its text that will be looked at; 0: all.

    Raises:
        UserError: for a cache that does not exist, does not fit the configuration, or has no such document.
    """
    directory, caches = find_caches(config)
    name = full_name(caches, name)
    if caches[name].config.gives_rows:
        raise UserError(f"{name} is rows that a pipeline of Grain makes; there are no documents to show")
    if not caches[name].begun:
        raise UserError(f"{caches[name].url} is not built yet; run: lmt data build")
    build = open_builds(config, directory, caches)[name]
    assert not isinstance(build, ReadyRows)
    ledger = build.look()
    if first >= ledger.num_documents:
        so_far = "" if ledger.finished else " so far; lmt data build goes on with it"
        raise UserError(f"there is no document {first}: {build.store.url} holds {ledger.num_documents}{so_far}")
    documents = _Documents(build, ledger, chars)
    for number in range(first, min(first + count, ledger.num_documents)):
        yield documents[number]


class _Documents:
    """The documents of a cache by their numbers, each whole, though it may begin in an earlier part than it ends in."""

    def __init__(self, build: Build | FinishedCache, ledger: Ledger, chars: int):
        self._build, self._ledger, self._chars = build, ledger, chars
        self._ended = np.cumsum(ledger.documents)
        self._tokens = TokenStream(build.store, ledger, token_dtype(build.tokenizer.vocab_size))
        self._mask = LossMaskStream(build.store, ledger, np.dtype(np.uint8)) if ledger.marks else None

    def __getitem__(self, number: int) -> ShownDocument:
        store, ledger = self._build.store, self._ledger
        # Documents are numbered by where they end, since a part counts those that end in it.
        part = int(np.searchsorted(self._ended, number, side="right"))
        index = number - (int(self._ended[part - 1]) if part else 0)
        lengths = read_lengths(store, ledger, part)
        start, length = sum(ledger.tokens[:part]) + int(lengths[:index].sum()), int(lengths[index])
        if index == 0:
            first, before = begin_of(store, ledger, part)
            if first != part:
                part, index = first, len(read_lengths(store, ledger, first)) - 1
            start, length = start - before, length + before
        in_loss_T = None
        if self._mask is not None:
            in_loss_T = (self._mask.read(np.array([start]), length)[0] & IN_LOSS) != 0
        source = source_of(store, ledger, self._build.shards, part, index)
        counted = length if in_loss_T is None else int(in_loss_T.sum())
        return ShownDocument(number, source, length, counted, self._text(start, length, in_loss_T))

    def _text(self, start: int, length: int, in_loss_T: np.ndarray | None) -> str:
        """Decodes more characters than are asked for, where there are more: a document may be larger than memory."""
        # A first guess of the tokens that make so many characters, raised until it suffices.
        count = 8 * self._chars if self._chars else length
        while True:
            ids_T = self._tokens.read(np.array([start]), min(count, length))[0]
            text = self._decode(ids_T) if in_loss_T is None else self._bracketed(ids_T, in_loss_T[:count])
            if count >= length or len(text) > self._chars:
                return text
            count *= 8

    def _decode(self, ids_T: np.ndarray) -> str:
        return self._build.tokenizer.decode(ids_T.tolist())

    def _bracketed(self, ids_T: np.ndarray, in_loss_T: np.ndarray) -> str:
        """Decodes tokens, with brackets around the runs that the loss counts."""
        changes = np.flatnonzero(np.diff(in_loss_T)) + 1
        texts = [self._decode(run) for run in np.split(ids_T, changes)]
        counted = [in_loss_T[place] for place in [0, *changes.tolist()]]
        return "".join(f"⟦{text}⟧" if inside else text for text, inside in zip(texts, counted, strict=True))


def full_name(names: Collection[str], name: str) -> str:
    """Completes the name of a cache: `train` means that of the only set.

    Raises:
        UserError: naming those that exist.
    """
    for known in names:
        if name in (known, known.partition("/")[2] if len({k.partition("/")[0] for k in names}) == 1 else known):
            return known
    raise UserError(f"there is no cache {name}; name one of these with --cache: {', '.join(names)}")
