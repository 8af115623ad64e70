"""File format of a cache.

    manifest.json            everything that determines the cache; its hash is the identity of the cache
    parts/SSSSS-PPPPP.bin    token ids, raw little-endian u2 or u4: documents in order, each ended by EOS (absent if
                             the tokens stay in a user's file: then the commit record has their `place`, and the ledger
                             lists all `places`; see `token_location.py`)
    parts/SSSSS-PPPPP.len    u4 per document (or piece of a document): its number of tokens, including EOS
    parts/SSSSS-PPPPP.row    u4 per document (or piece): its row in the shard, counted from the part's first row
    parts/SSSSS-PPPPP.msk    the loss mask, if the data format has one: two bits per token, lowest bit first. One marks
                             tokens in the loss, the other marks the ends of documents (EOS may then also occur inside
                             a document)
    parts/SSSSS-PPPPP.fea    audio features, if the data format stores them: little-endian f4, frames x channels of
                             each document in order, with the same shape for all documents
    parts/SSSSS-PPPPP.json   the commit record, written last: a file not listed in it does not exist
    shards/SSSSS.json        the number of parts of a shard, written when the shard has been read to its end
    ledger.json              the contiguous prefix of committed parts; the only entry point for readers
    builder.json             the heartbeat of the building process; removed when the cache is finished

S is the shard number, P the part number within the shard. Files are written atomically and never changed, except the
ledger and the heartbeat, which are replaced atomically. A part ends where the text of its rows exceeds a limit, so its
bytes depend only on the source.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, NotRequired, TypedDict, cast

import numpy as np

from lm_trainer.core.errors import MachineError
from lm_trainer.data.cache.kvstore import KvStore, canonical_json, parse_checked_json

FORMAT = 1
MANIFEST, LEDGER, BUILDER = "manifest.json", "ledger.json", "builder.json"

RECORD_KEYS = frozenset(
    {
        *("shard", "part", "rows", "documents", "continues", "open", "text_bytes", "tokens"),
        *("empty", "replaced", "bad", "bad_examples", "blobs"),
    }
)
"""The keys of a commit record."""

# Small first parts let a run start on little text. Large later parts limit the number of files.
PART_BYTES = (1 << 20, 16 << 20)
"""Number of text bytes at which the first part of a shard ends, and the maximum; it doubles with each part."""


KINDS = ("bin", "len", "row", "msk", "fea")
"""Kinds of files of a part, in addition to its commit record."""
PART_NAME = re.compile(r"\d{5,}-\d{5,}")
"""The name of a part, as made by `part_name`."""


def part_name(shard: int, part: int) -> str:
    """Returns the name of a part, made of its shard number and its number within the shard."""
    return f"{shard:05d}-{part:05d}"


def part_key(name: str, kind: str) -> str:
    """Returns the key of one file of a part: `bin`, `len`, `row`, `msk`, `fea` or `json`."""
    return f"parts/{name}.{kind}"


def shard_key(shard: int) -> str:
    """Returns the key of the file that marks that a shard has been read to its end."""
    return f"shards/{shard:05d}.json"


class FileRecord(TypedDict):
    """The entry of one file in a commit record, as returned by `file_record`."""

    bytes: int
    sha256: str
    block_bytes: NotRequired[int]
    blocks: NotRequired[str]


class CommitRecord(TypedDict):
    """The commit record of a part, with at least `RECORD_KEYS`."""

    shard: int
    part: int
    rows: list[int]
    documents: int
    continues: bool
    open: bool
    text_bytes: int
    tokens: int
    empty: int
    replaced: int
    bad: int
    bad_examples: list[str]
    blobs: dict[str, FileRecord]
    place: dict[str, Any]
    """Location of the tokens; only present if they stay in a user's file."""


def read_record(store: KvStore, name: str) -> CommitRecord | None:
    """Reads the commit record of a part; None if it is not committed.

    Raises:
        MachineError: if it is damaged.
    """
    key = part_key(name, "json")
    content = store.read(key)
    if content is None:
        return None
    record = parse_json(store, key, content)
    # The kinds become keys and thus paths, so unknown ones are rejected.
    if isinstance(record, dict) and record.keys() >= RECORD_KEYS and {*record["blobs"]} <= {*KINDS}:
        return cast(CommitRecord, record)
    raise damage_error(store, key)


def read_manifest(store: KvStore) -> dict[str, Any] | None:
    """Reads the manifest of a cache; None if it does not exist.

    Raises:
        MachineError: if it is damaged.
    """
    content = store.read(MANIFEST)
    if content is None:
        return None
    manifest = parse_json(store, MANIFEST, content)
    shards = manifest.get("shards") if isinstance(manifest, dict) else None
    if not isinstance(shards, list) or not all(isinstance(x, dict) for x in (manifest.get("tokenizer"), *shards)):
        raise damage_error(store, MANIFEST)
    return manifest


def read_num_parts(store: KvStore, index: int) -> int | None:
    """Reads the number of parts of a shard that has been read to its end; None for an unfinished shard.

    Raises:
        MachineError: if the shard's file is damaged.
    """
    key = shard_key(index)
    content = store.read(key)
    if content is None:
        return None
    record = parse_json(store, key, content)
    if not isinstance(record, dict) or not isinstance(record.get("parts"), int):
        raise damage_error(store, key)
    return record["parts"]


def parse_json(store: KvStore, key: str, content: bytes) -> Any:
    """Parses a JSON file of a cache.

    Raises:
        MachineError: if it is damaged.
    """
    try:
        return parse_checked_json(content)
    except ValueError as error:
        raise damage_error(store, key, f"is damaged ({error})") from None


def damage_error(store: KvStore, key: str, problem: str = "is damaged") -> MachineError:
    """Returns the error for a damaged file of a cache."""
    parts = "remove what is damaged with lmt data verify --repair, or " if key.startswith("parts/") else ""
    return MachineError(f"{store.url}/{key} {problem}; {parts}remove {store.url} to build it again")


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the dtype of a cache with ids below `vocab_size`: u2 if they fit, else u4."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def fingerprint(value: object) -> str:
    """Returns the hash of a JSON value, as sixteen hex digits."""
    return hashlib.sha256(canonical_json(value)).hexdigest()[:16]
