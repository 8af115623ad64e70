"""Inspects caches: their progress, the integrity of their files, and their documents.

Shape letters: D documents, T tokens of a document.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lm_trainer.core.data_content import DataContent
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
from lm_trainer.data.formats import FormatConfig, TextFormat
from lm_trainer.data.formats.too_long import TooLong
from lm_trainer.data.provenance import find_source
from lm_trainer.data.rows.packing_stats import PackingStats, packing_stats
from lm_trainer.data.rows.pair_packing import pack_pairs
from lm_trainer.data.tokenize.build import Build
from lm_trainer.data.tokenize.cache_spec import CacheSpec, find_caches
from lm_trainer.data.tokenize.finished_cache import FinishedCache
from lm_trainer.data.tokenize.lock import parse_claim
from lm_trainer.data.tokenize.plan import find_mismatches, open_builds
from lm_trainer.data.tokenize.ready_rows import ReadyRows
from lm_trainer.data.tokenizer.brackets import decode_with_brackets


class FeatureStatus(NamedTuple):
    """The audio features of a cache's documents."""

    frames: int
    channels: int
    stored: bool
    """False if the features are recomputed for every batch."""

    def describe(self, documents: int) -> str:
        """Describes the features of a number of documents, such as `features of 3000 x 80 (1.9 MB)`."""
        # Each number is a float32 of four bytes.
        size = f"{4 * self.frames * self.channels * documents / 1e6:,.1f} MB" if self.stored else "made on the fly"
        return f"features of {self.frames} x {self.channels} ({size})"


@dataclass(frozen=True)
class CacheStatus:
    """The state of one cache."""

    name: str
    """`train` or `validation`, preceded by the name of the set in a mixture."""
    url: str
    fingerprint: str | None
    """The fingerprint of the manifest; None if the cache does not exist yet."""
    ledger: Ledger
    num_shards: int
    builder: str | None
    """The process that builds the cache, and the time since its last heartbeat; None if no process does."""
    misfit: str | None
    """The reason why training would refuse the cache, if any."""
    key: str = ""
    """`NAME/train` or `NAME/validation`."""
    features: FeatureStatus | None = None
    """Features of the documents; None if there is only text."""
    prebuilt: bool = False
    """True for a read-only cache that was built elsewhere."""
    format: FormatConfig = field(default_factory=TextFormat)

    @property
    def begun(self) -> bool:
        """True if any part has been built, even if the manifest is lost."""
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
            f"{self.name}: {state}; {len(ledger.parts)} parts, {self.format.describe_count(ledger.num_documents)}, "
            f"{ledger.num_tokens:,} tokens of {sum(ledger.text_bytes) / 1e6:,.1f} MB{feature_text}{bad}{by} "
            f"({self.url}, {self.fingerprint or 'no manifest'})"
        )


def cache_statuses(config: DataConfig) -> list[CacheStatus]:
    """Returns the state of each cache, including any mismatch with the configuration.

    Reads no text and changes no file.
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
        cache.title,
        store.url,
        manifest_hash,
        ledger,
        shards,
        builder_text,
        misfit,
        name,
        features,
        cache.prebuilt,
        format,
    )


def verify_cache(store: KvStore, ledger: Ledger) -> list[str]:
    """Compares every file of a cache with its commit record. Returns one line for each damaged file."""
    return [line for lines in find_damaged_parts(store, ledger).values() for line in lines]


def find_damaged_parts(store: KvStore, ledger: Ledger) -> dict[int, list[str]]:
    """Checks every file of a cache like `verify_cache`. Returns the lines of each damaged part, keyed by its number."""
    lines = {part: _find_problems(store, ledger, part) for part in range(len(ledger.parts))}
    return {part: problems for part, problems in lines.items() if problems}


def remove_parts(store: KvStore, ledger: Ledger, parts: Collection[int]) -> int:
    """Removes the parts with the given numbers, so that the next build recreates them. Returns how many it removed.

    A build resumes at the first missing part of a shard, and writes exactly the bytes that the removed parts had.
    """
    for part in parts:
        name = ledger.parts[part]
        store.delete(shard_key(int(name.partition("-")[0])))
        store.delete(part_key(name, "json"))
    if parts:
        # The next builder adds the existing parts to a new ledger.
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
    """Statistics of a cache's document lengths, and of how well documents fill rows."""

    documents: int
    tokens: int
    bytes_per_token: float | None
    """Number of UTF-8 bytes of text per token; None if the tokens were made elsewhere."""
    quantiles: dict[str, int]
    """Quantiles of the number of tokens per document, including its end: the minimum, the median, and so on."""
    packing: dict[str, PackingStats]
    left_out: int
    """Number of documents that `data.exclude` leaves out. The other statistics do not include them."""
    left_out_tokens: int
    too_long: int = 0
    """Number of documents that are longer than a row."""


def cache_stats(
    store: KvStore,
    ledger: Ledger,
    seq_len: int | None,
    exclusion: Exclusion | None = None,
    *,
    too_long: TooLong = "split",
) -> CacheStats:
    """Computes statistics of document lengths, and of how well documents fill rows of `seq_len`.

    Excluded documents do not count. If `seq_len` is None, each document is a separate row, so packing is not computed.
    `too_long` is the treatment of documents that are longer than a row.

    Raises:
        UserError: if the cache does not have any documents yet.
    """
    lengths_D = document_lengths(store, ledger)
    if not len(lengths_D):
        raise UserError(f"{store.url} holds no documents yet; run: lmt data build")
    left_out = np.zeros(0, np.int64)
    if exclusion is not None:
        exclusion.check_matches_cache(store.url, ledger, len(lengths_D))
        left_out = lengths_D[exclusion.documents_N]
        lengths_D = np.delete(lengths_D, exclusion.documents_N)
    quantiles = _quantiles(lengths_D)
    # Loss targets are counted in the full stream, so they are not counted if documents are excluded.
    masked = ledger.marks and not len(left_out)
    targets = _iter_targets(store, ledger, lengths_D) if masked else None
    packing = {} if seq_len is None else packing_stats(lengths_D, seq_len, targets, too_long)
    num_long = 0 if seq_len is None else int(np.count_nonzero(lengths_D - 1 > seq_len))
    per_token = None if ledger.places else sum(ledger.text_bytes) / ledger.num_tokens
    sums = int(lengths_D.sum()), per_token, quantiles, packing, len(left_out), int(left_out.sum()), num_long
    return CacheStats(len(lengths_D), *sums)


def _iter_targets(store: KvStore, ledger: Ledger, lengths_D: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the positions in the stream of the loss targets, int64, part by part.

    Loss targets are tokens in the loss that follow another token of their document.
    """
    mask, starts_D = LossMaskStream(store, ledger, np.dtype(np.uint8)), np.cumsum(lengths_D) - lengths_D
    begin = 0
    # Works part by part, because the full mask may not fit in memory.
    for tokens in ledger.tokens:
        end = begin + tokens
        in_loss_T = (mask.read(np.array([begin]), tokens)[0] & IN_LOSS) != 0
        in_loss_T[starts_D[np.searchsorted(starts_D, begin) : np.searchsorted(starts_D, end)] - begin] = False
        yield np.flatnonzero(in_loss_T) + begin
        begin = end


class PairStats(NamedTuple):
    """Statistics of the pairs of a cache, and of how well they fill rows."""

    pairs: int
    desirable: int
    """Number of pairs with a chosen answer, which is the number of desirable answers if answers have labels."""
    tokens: int
    quantiles: dict[str, int]
    """Quantiles of the number of positions that both documents of a pair take in a row."""
    too_long: int
    """Number of pairs that are longer than a row."""
    rows: int
    filled: float
    """Fraction of the positions of the rows that are not padding."""


def pair_stats(store: KvStore, ledger: Ledger, seq_len: int) -> PairStats:
    """Computes statistics of a cache whose rows are pairs. Raises `UserError` if it does not have any yet."""
    lengths_D = document_lengths(store, ledger)
    if not len(lengths_D):
        raise UserError(f"{store.url} holds no pairs yet; run: lmt data build")
    packed = pack_pairs(lengths_D, seq_len)
    sizes_P, plan = (lengths_D - 1).reshape(-1, 2).sum(1), packed.plan
    filled = int(plan.lengths_P.sum()) / max(plan.num_rows * seq_len, 1)
    desirable = int(np.count_nonzero(lengths_D[::2] > 1))
    return PairStats(
        packed.pairs, desirable, int(lengths_D.sum()), _quantiles(sizes_P), packed.too_long, plan.num_rows, filled
    )


def _quantiles(values: np.ndarray) -> dict[str, int]:
    points = {"least": 0, "5 %": 5, "median": 50, "95 %": 95, "most": 100}
    return {name: int(np.percentile(values, point)) for name, point in points.items()}


class ShownDocument(NamedTuple):
    """A document as it is stored in the cache."""

    number: int
    """Number of the document. The two documents of a pair have the number of the pair."""
    where: str
    """Origin of the document: its file, and its line or row."""
    tokens: int
    in_loss: int
    """Number of tokens that count in the loss."""
    text: str
    """The text, or a beginning of it that is longer than requested. If the cache has a loss mask, tokens that count in
    the loss are enclosed in `⟦` and `⟧`."""
    role: str = ""
    """Role of the answer in its pair, such as `chosen` or `undesirable`."""


def inspect_documents(config: DataConfig, name: str, first: int, count: int, chars: int = 0) -> Iterator[ShownDocument]:
    """Yields documents of a built cache, as the model sees them.

    Args:
        config: the `data` section that built the cache.
        name: name of the cache, `NAME/train` or `NAME/validation`. For a single set, `train` or `validation`.
        first: number of the first document, or of the first pair if rows are pairs.
        count: number of documents or of pairs.
        chars: number of characters to show of each text; 0 shows all.

    Raises:
        UserError: if the cache does not exist, does not match the configuration, or does not contain the document.
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
    content = build.format.content
    total = ledger.num_documents if content == "documents" else ledger.num_documents // 2
    if first >= total:
        so_far = "" if ledger.finished else " so far; lmt data build goes on with it"
        raise UserError(f"there is no {content[:-1]} {first}: {build.store.url} holds {total}{so_far}")
    documents = _DocumentReader(build, ledger, chars)
    for number in range(first, min(first + count, total)):
        if content == "documents":
            yield documents[number]
            continue
        for side, role in enumerate(_ROLES[content]):
            shown = documents[2 * number + side]
            # An answer with a label has an empty document in place of the other answer.
            if shown.tokens > 1:
                yield shown._replace(number=number, role=role)


_ROLES: dict[DataContent, tuple[str, str]] = {
    "pairs": ("chosen", "rejected"),
    "examples": ("desirable", "undesirable"),
}
"""Roles of the two documents of a pair."""


class _DocumentReader:
    """Reads full documents of a cache by number, including documents that span several parts."""

    def __init__(self, build: Build | FinishedCache, ledger: Ledger, chars: int):
        self._build, self._ledger, self._chars = build, ledger, chars
        self._ended = np.cumsum(ledger.documents)
        self._tokens = TokenStream(build.store, ledger, token_dtype(build.tokenizer.vocab_size))
        self._mask = LossMaskStream(build.store, ledger, np.dtype(np.uint8)) if ledger.marks else None

    def __getitem__(self, number: int) -> ShownDocument:
        store, ledger = self._build.store, self._ledger
        # Documents are numbered by their ends, since a part counts the documents that end in it.
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
        """Decodes at least the requested number of characters, if the text has as many.

        Does not decode the full text, because a document may be larger than memory.
        """
        # An initial guess of the number of tokens needed, which is raised until it suffices.
        count = 8 * self._chars if self._chars else length
        while True:
            ids_T = self._tokens.read(np.array([start]), min(count, length))[0]
            decode = self._build.tokenizer.decode
            text = (
                decode(ids_T.tolist()) if in_loss_T is None else decode_with_brackets(decode, ids_T, in_loss_T[:count])
            )
            if count >= length or len(text) > self._chars:
                return text
            count *= 8


def complete_cache_name(names: Collection[str], name: str) -> str:
    """Completes the name of a cache: `train` is short for `NAME/train` if there is only one set.

    Raises:
        UserError: if the name is unknown; lists the valid names.
    """
    for full in names:
        if name in (full, full.partition("/")[2] if len({k.partition("/")[0] for k in names}) == 1 else full):
            return full
    raise UserError(f"there is no cache {name}; name one of these with --cache: {', '.join(names)}")
