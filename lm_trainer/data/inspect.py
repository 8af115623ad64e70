"""Inspection of caches: their progress, the integrity of their files, and their documents.

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
from lm_trainer.data.cache.documents import document_lengths, find_first_piece, read_lengths
from lm_trainer.data.cache.exclusion import Exclusion
from lm_trainer.data.cache.format import (
    BUILDER,
    LEDGER,
    FileRecord,
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
from lm_trainer.data.cache.token_location import TokenLocation
from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.config import DataConfig
from lm_trainer.data.provenance import find_source
from lm_trainer.data.rows.packing import PackingStats, packing_stats
from lm_trainer.data.tokenize.build import Build
from lm_trainer.data.tokenize.cache_spec import CacheSpec, find_caches
from lm_trainer.data.tokenize.finished_cache import FinishedCache
from lm_trainer.data.tokenize.lock import parse_claim
from lm_trainer.data.tokenize.plan import find_mismatches, open_builds
from lm_trainer.data.tokenize.ready_rows import ReadyRows


class FeatureStatus(NamedTuple):
    """Features of the documents of an audio cache."""

    frames: int
    channels: int
    stored: bool
    """False if they are recomputed for every batch."""

    def describe(self, documents: int) -> str:
        """Describes the features of some documents, such as `features of 3000 x 80 (1.9 MB)`."""
        # float32: four bytes each.
        size = f"{4 * self.frames * self.channels * documents / 1e6:,.1f} MB" if self.stored else "made on the fly"
        return f"features of {self.frames} x {self.channels} ({size})"


@dataclass(frozen=True)
class CacheStatus:
    """State of one cache."""

    name: str
    """`train` or `validation`, preceded by the name of the set in a mixture."""
    url: str
    fingerprint: str | None
    """The fingerprint of the manifest; None if the cache does not exist yet."""
    ledger: Ledger
    num_shards: int
    builder: str | None
    """The process building it, and the time since its last heartbeat."""
    misfit: str | None
    """The reason training would refuse the cache, if any."""
    key: str = ""
    """`NAME/train` or `NAME/validation`."""
    features: FeatureStatus | None = None
    """None for text only."""
    prebuilt: bool = False
    """True for a read-only cache built elsewhere."""

    @property
    def begun(self) -> bool:
        """True if any part was built, even if the manifest is lost."""
        return self.fingerprint is not None or self.ledger.begun

    def __str__(self) -> str:
        ledger = self.ledger
        if not self.begun:
            return f"{self.name}: not begun ({self.url})"
        state = "finished" if ledger.finished else f"{ledger.next[0]} of {self.num_shards} shards done"
        bad = f", {ledger.bad} bad rows left out" if ledger.bad else ""
        feature_text = f", {self.features.describe(ledger.num_documents)}" if self.features else ""
        by = f", {self.builder} builds it" if self.builder else ""
        return (
            f"{self.name}: {state}; {len(ledger.parts)} parts, {ledger.num_documents:,} documents, "
            f"{ledger.num_tokens:,} tokens of {sum(ledger.text_bytes) / 1e6:,.1f} MB{feature_text}{bad}{by} "
            f"({self.url}, {self.fingerprint or 'no manifest'})"
        )


def cache_statuses(config: DataConfig) -> list[CacheStatus]:
    """Returns the state of each cache, including any mismatch with the configuration; reads no text and changes no
    file.
    """
    directory, caches = find_caches(config)
    misfits = find_mismatches(config, directory, caches)
    return [_cache_status(name, cache, misfits.get(name)) for name, cache in caches.items()]


def _cache_status(name: str, cache: CacheSpec, misfit: str | None) -> CacheStatus:
    store = KvStore(cache.url)
    manifest, builder = read_manifest(store), parse_claim(store.read(BUILDER))
    builder_text = None
    if builder is not None:
        builder_text = f"process {builder['pid']} of {builder['host']}, seen {time.time() - builder['beat']:.0f} s ago,"
    manifest_hash = None if manifest is None else fingerprint(manifest)
    format = cache.config.format
    features = None if format.features_shape is None else FeatureStatus(*format.features_shape, format.keeps_features)
    ledger = Ledger.read(store)
    shards = len(cache.shards)
    return CacheStatus(
        cache.title, store.url, manifest_hash, ledger, shards, builder_text, misfit, name, features, cache.prebuilt
    )


def verify_cache(store: KvStore, ledger: Ledger) -> list[str]:
    """Compares every file of a cache with its commit record; returns one line for each damaged file."""
    return [line for lines in find_damaged_parts(store, ledger).values() for line in lines]


def find_damaged_parts(store: KvStore, ledger: Ledger) -> dict[int, list[str]]:
    """Checks every file of a cache like `verify`; returns the lines of each damaged part by its number."""
    lines = {part: _find_problems(store, ledger, part) for part in range(len(ledger.parts))}
    return {part: problems for part, problems in lines.items() if problems}


def remove_parts(store: KvStore, ledger: Ledger, parts: Collection[int]) -> int:
    """Removes parts by number, so the next build recreates them; returns their count.

    A build starts with the first missing part of a shard and writes the same bytes as before.
    """
    for part in parts:
        name = ledger.parts[part]
        store.delete(shard_key(int(name.partition("-")[0])))
        store.delete(part_key(name, "json"))
    if parts:
        # The next builder re-adds the existing parts.
        store.delete(LEDGER)
    return len(parts)


def _find_problems(store: KvStore, ledger: Ledger, part: int) -> list[str]:
    name = ledger.parts[part]
    try:
        record = read_record(store, name)
    except UserError:
        return [f"{store.url}/{part_key(name, 'json')} is damaged"]
    if record is None:
        return [f"{store.url}/{part_key(name, 'json')} is missing"]
    if not ledger.matches_record(part, record):
        return [f"{store.url}/{part_key(name, 'json')} does not fit {LEDGER}"]
    problems = [
        problem for kind, blob in record["blobs"].items() if (problem := _compare_file(store, name, kind, blob))
    ]
    if (location := record.get("place")) is not None:
        problems += _compare_token_file(location, ledger.tokens[part])
    return problems


def _compare_token_file(record: dict[str, Any], count: int) -> list[str]:
    location = TokenLocation(*(record[name] for name in TokenLocation._fields))
    try:
        content = np.ascontiguousarray(location.open(count)[0:count])
    except MachineError as error:
        return [str(error)]
    return [] if is_intact(content, record) else [f"{location.path} has changed since it was indexed"]


def _compare_file(store: KvStore, name: str, kind: str, blob: FileRecord) -> str | None:
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
    """Document lengths of a cache, and how well they fill rows."""

    documents: int
    tokens: int
    bytes_per_token: float | None
    """Bytes of the text in UTF-8; None if the tokens were made elsewhere."""
    quantiles: dict[str, int]
    """Tokens of a document, including its end: the least, the median, ..."""
    packing: dict[str, PackingStats]
    left_out: int
    """Documents left out by `data.exclude`; the other statistics do not include them."""
    left_out_tokens: int


def cache_stats(store: KvStore, ledger: Ledger, seq_len: int | None, exclusion: Exclusion | None = None) -> CacheStats:
    """Computes document lengths and how well they fill rows of `seq_len`, without excluded documents.

    Without `seq_len` each document is its own row, so packing is not computed.

    Raises:
        UserError: if the cache holds no documents yet.
    """
    lengths_D = document_lengths(store, ledger)
    if not len(lengths_D):
        raise UserError(f"{store.url} holds no documents yet; run: lmt data build")
    left_out = np.zeros(0, np.int64)
    if exclusion is not None:
        exclusion.check_matches_cache(store.url, ledger, len(lengths_D))
        left_out = lengths_D[exclusion.documents_N]
        lengths_D = np.delete(lengths_D, exclusion.documents_N)
    points = {"least": 0, "5 %": 5, "median": 50, "95 %": 95, "most": 100}
    quantiles = {name: int(np.percentile(lengths_D, point)) for name, point in points.items()}
    # The loss mask is counted over the full stream, so it is not counted if documents are excluded.
    masked = ledger.marks and not len(left_out)
    count_targets = partial(_num_targets, store, ledger, lengths_D) if masked else None
    packing = {} if seq_len is None else packing_stats(lengths_D, seq_len, count_targets)
    per_token = None if ledger.places else sum(ledger.text_bytes) / ledger.num_tokens
    return CacheStats(
        len(lengths_D), int(lengths_D.sum()), per_token, quantiles, packing, len(left_out), int(left_out.sum())
    )


def _num_targets(store: KvStore, ledger: Ledger, lengths_D: np.ndarray, count: int) -> int:
    """Counts loss targets among the first `count` tokens: tokens in the loss that follow another token of their
    document.
    """
    mask, starts_D = LossMaskStream(store, ledger, np.dtype(np.uint8)), np.cumsum(lengths_D) - lengths_D
    targets = begin = 0
    # Part by part: the full mask may not fit in memory.
    for tokens in ledger.tokens:
        end = min(begin + tokens, count)
        if end <= begin:
            break
        in_loss_T = (mask.read(np.array([begin]), end - begin)[0] & IN_LOSS) != 0
        firsts = starts_D[np.searchsorted(starts_D, begin) : np.searchsorted(starts_D, end)] - begin
        targets, begin = targets + int(in_loss_T.sum()) - int(in_loss_T[firsts].sum()), end
    return targets


class ShownDocument(NamedTuple):
    """A document as stored in the cache."""

    number: int
    where: str
    """Its origin: the file and the line or row."""
    tokens: int
    in_loss: int
    """Tokens counted by the loss."""
    text: str
    """The text, or a beginning of it longer than requested. If the cache has a loss mask, tokens counted by the loss
    are enclosed in `⟦` and `⟧`."""


def inspect_documents(config: DataConfig, name: str, first: int, count: int, chars: int = 0) -> Iterator[ShownDocument]:
    """Yields documents of a built cache, as the model sees them.

    Args:
        config: the `data` section that built it.
        name: `NAME/train` or `NAME/validation`; `train` and `validation` for a single set.
        first: number of the first document.
        count: number of documents.
        chars: characters of each text to show; 0 shows all.

    Raises:
        UserError: for a cache that does not exist, does not fit the configuration, or has no such document.
    """
    directory, caches = find_caches(config)
    name = complete_cache_name(caches, name)
    if caches[name].config.gives_rows:
        raise UserError(f"{name} is rows that a pipeline of Grain makes; there are no documents to show")
    if not caches[name].begun:
        raise UserError(f"{caches[name].url} is not built yet; run: lmt data build")
    build = open_builds(config, directory, caches)[name]
    assert not isinstance(build, ReadyRows)
    ledger = build.read_ledger()
    if first >= ledger.num_documents:
        so_far = "" if ledger.finished else " so far; lmt data build goes on with it"
        raise UserError(f"there is no document {first}: {build.store.url} holds {ledger.num_documents}{so_far}")
    documents = _DocumentReader(build, ledger, chars)
    for number in range(first, min(first + count, ledger.num_documents)):
        yield documents[number]


class _DocumentReader:
    """Full documents of a cache by number, including documents that span several parts."""

    def __init__(self, build: Build | FinishedCache, ledger: Ledger, chars: int):
        self._build, self._ledger, self._chars = build, ledger, chars
        self._ended = np.cumsum(ledger.documents)
        self._tokens = TokenStream(build.store, ledger, token_dtype(build.tokenizer.vocab_size))
        self._mask = LossMaskStream(build.store, ledger, np.dtype(np.uint8)) if ledger.marks else None

    def __getitem__(self, number: int) -> ShownDocument:
        store, ledger = self._build.store, self._ledger
        # Documents are numbered by their ends: a part counts the documents that end in it.
        part = int(np.searchsorted(self._ended, number, side="right"))
        index = number - (int(self._ended[part - 1]) if part else 0)
        lengths = read_lengths(store, ledger, part)
        start, length = sum(ledger.tokens[:part]) + int(lengths[:index].sum()), int(lengths[index])
        if index == 0:
            first, earlier_tokens = find_first_piece(store, ledger, part)
            if first != part:
                part, index = first, len(read_lengths(store, ledger, first)) - 1
            start, length = start - earlier_tokens, length + earlier_tokens
        in_loss_T = None
        if self._mask is not None:
            in_loss_T = (self._mask.read(np.array([start]), length)[0] & IN_LOSS) != 0
        source = find_source(store, ledger, self._build.shards, part, index)
        counted = length if in_loss_T is None else int(in_loss_T.sum())
        return ShownDocument(number, source, length, counted, self._decode_text(start, length, in_loss_T))

    def _decode_text(self, start: int, length: int, in_loss_T: np.ndarray | None) -> str:
        """Decodes more characters than requested, if the text has more, but not all: a document may be larger than
        memory.
        """
        # Initial guess of the tokens needed, raised until it suffices.
        count = 8 * self._chars if self._chars else length
        while True:
            ids_T = self._tokens.read(np.array([start]), min(count, length))[0]
            text = self._decode(ids_T) if in_loss_T is None else self._decode_with_brackets(ids_T, in_loss_T[:count])
            if count >= length or len(text) > self._chars:
                return text
            count *= 8

    def _decode(self, ids_T: np.ndarray) -> str:
        return self._build.tokenizer.decode(ids_T.tolist())

    def _decode_with_brackets(self, ids_T: np.ndarray, in_loss_T: np.ndarray) -> str:
        """Decodes tokens, with brackets around the runs counted by the loss."""
        changes = np.flatnonzero(np.diff(in_loss_T)) + 1
        texts = [self._decode(run) for run in np.split(ids_T, changes)]
        counted = [in_loss_T[position] for position in [0, *changes.tolist()]]
        return "".join(f"⟦{text}⟧" if inside else text for text, inside in zip(texts, counted, strict=True))


def complete_cache_name(names: Collection[str], name: str) -> str:
    """Completes the name of a cache: `train` is short for the only set's `NAME/train`.

    Raises:
        UserError: for an unknown name, with the valid names.
    """
    for full in names:
        if name in (full, full.partition("/")[2] if len({k.partition("/")[0] for k in names}) == 1 else full):
            return full
    raise UserError(f"there is no cache {name}; name one of these with --cache: {', '.join(names)}")
