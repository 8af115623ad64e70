"""File format of a cache.

    manifest.json            all that the cache is made of; its hash is the cache's identity
    parts/SSSSS-PPPPP.bin    token ids, raw little-endian u2 or u4: documents one after another, each ended by EOS
                             (absent where the tokens stay in a file of the user's: then the commit record has their
                             `place`, and the ledger lists all `places`; see `token_place.py`)
    parts/SSSSS-PPPPP.len    u4 per document (or piece of one): its tokens, EOS included
    parts/SSSSS-PPPPP.row    u4 per document: its row in the shard, counted from the part's first row
    parts/SSSSS-PPPPP.msk    the loss mask, where the data format has one: two bits per token, lowest bit first. One
                             says that the loss counts the token, the other that it ends a document (EOS may then
                             also stand inside one)
    parts/SSSSS-PPPPP.fea    what a model hears, where the data format keeps it: little-endian f4, frames x channels of
                             each document in turn, the same number for all
    parts/SSSSS-PPPPP.json   the commit record, written last: a file that it does not list does not exist
    shards/SSSSS.json        written when a shard has been read to its end: the number of its parts
    ledger.json              the contiguous prefix of parts: all that a reader looks at
    builder.json             the heartbeat of the process that builds; gone when the cache is finished

S is the number of a shard, P that of a part in it. Files are written whole and never changed, but for the ledger and
the heartbeat, which are replaced whole. A part is cut where the text of its rows passes a size, so its bytes depend on
the source alone.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import numpy as np

from lm_trainer.core.errors import MachineError
from lm_trainer.data.cache.kvstore import KvStore, canonical_json, parsed_json

FORMAT = 1
MANIFEST, LEDGER, BUILDER = "manifest.json", "ledger.json", "builder.json"

RECORD_KEYS = frozenset(
    {
        *("shard", "part", "rows", "documents", "continues", "open", "text_bytes", "tokens"),
        *("empty", "replaced", "bad", "bad_examples", "blobs"),
    }
)
"""The keys of a commit record."""

# Small first parts let a run begin on little text; large later ones keep the number of files down.
PART_BYTES = (1 << 20, 16 << 20)
"""Text bytes after which the first part of a shard is cut; doubles with each part up to the second figure."""


KINDS = ("bin", "len", "row", "msk", "fea")
"""Files of a part, beside its commit record."""
PART_NAME = re.compile(r"\d{5,}-\d{5,}")
"""The name of a part, as `part_name` makes it."""


def part_name(shard: int, part: int) -> str:
    """Names a part by the numbers of its shard and of itself in the shard."""
    return f"{shard:05d}-{part:05d}"


def part_key(name: str, kind: str) -> str:
    """Returns the key of one file of a part: `bin`, `len`, `row`, `msk`, `fea` or `json`."""
    return f"parts/{name}.{kind}"


def shard_key(shard: int) -> str:
    """Returns the key of the file that says that a shard has been read to its end."""
    return f"shards/{shard:05d}.json"


def read_record(store: KvStore, name: str) -> dict[str, Any] | None:
    """Reads the commit record of a part; None if it is not committed.

    Raises:
        MachineError: if it is not as it was written.
    """
    key = part_key(name, "json")
    content = store.read(key)
    if content is None:
        return None
    record = parsed(store, key, content)
    # The kinds become keys, and so paths: no others are read.
    if isinstance(record, dict) and record.keys() >= RECORD_KEYS and {*record["blobs"]} <= {*KINDS}:
        return record
    raise damaged(store, key)


def read_manifest(store: KvStore) -> dict[str, Any] | None:
    """Reads the manifest of a cache; None if there is none.

    Raises:
        MachineError: if it is none.
    """
    content = store.read(MANIFEST)
    if content is None:
        return None
    manifest = parsed(store, MANIFEST, content)
    shards = manifest.get("shards") if isinstance(manifest, dict) else None
    if not isinstance(shards, list) or not all(isinstance(x, dict) for x in (manifest.get("tokenizer"), *shards)):
        raise damaged(store, MANIFEST)
    return manifest


def parts_of_shard(store: KvStore, index: int) -> int | None:
    """Reads how many parts a shard has that was read to its end; None if it was not.

    Raises:
        MachineError: if the file that says so is not as it was written.
    """
    key = shard_key(index)
    content = store.read(key)
    if content is None:
        return None
    record = parsed(store, key, content)
    if not isinstance(record, dict) or not isinstance(record.get("parts"), int):
        raise damaged(store, key)
    return record["parts"]


def parsed(store: KvStore, key: str, content: bytes) -> Any:
    """Parses a JSON file of a cache.

    Raises:
        MachineError: if it is not as it was written.
    """
    try:
        return parsed_json(content)
    except ValueError as error:
        raise damaged(store, key, f"is damaged ({error})") from None


def damaged(store: KvStore, key: str, problem: str = "is damaged") -> MachineError:
    """Returns the error for a file of a cache that is not as it was written."""
    parts = "remove what is damaged with lmt data verify --repair, or " if key.startswith("parts/") else ""
    return MachineError(f"{store.url}/{key} {problem}; {parts}remove {store.url} to build it again")


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the type in which a cache keeps ids below `vocab_size`: u2 where they fit, else u4."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def fingerprint(value: Any) -> str:
    """Hashes a JSON value to sixteen hex digits."""
    return hashlib.sha256(canonical_json(value)).hexdigest()[:16]
