"""The manifest of a cache, which lists everything that determines its bytes, and its comparison with another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.data.cache.format import (
    FORMAT,
    MANIFEST,
    PART_BYTES,
    damage_error,
    fingerprint,
    read_manifest,
    token_dtype,
)
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.formats import FormatConfig
from lm_trainer.data.sources import Shard
from lm_trainer.data.tokenizer import Tokenizer

Manifest = dict[str, Any]
"""A manifest, as the JSON object that is stored in the cache."""


def make_manifest(
    shards: Sequence[Shard],
    tokenizer: Tokenizer,
    part_bytes: tuple[int, int] = PART_BYTES,
    format: FormatConfig | None = None,
) -> Manifest:
    """Returns everything that determines the bytes of a cache."""
    identity = format and format.identity(tokenizer)
    return {
        # Omitted for plain text, because even an empty entry would change the fingerprint of such caches.
        **({"document": identity} if identity else {}),
        "format": FORMAT,
        "tokenizer": tokenizer.fingerprint(),
        "dtype": token_dtype(tokenizer.vocab_size).str,
        "text": {"special_tokens": "plain", "lone_surrogates": "U+FFFD", "empty": "skipped", "eos": "after each"},
        "part_bytes": list(part_bytes),
        "shards": [shard.identity() for shard in shards],
    }


def count_matching_shards(store: KvStore, manifest: Manifest, ledger: Ledger) -> int:
    """Returns the number of leading shards of the cache that match the manifest.

    Every shard matches, unless a source changed before the build reached it. A shard that has no parts in the ledger
    has never been read, so it can be built from its current files.

    Raises:
        UserError: if the store holds the cache of other data; lists the entries that differ.
        MachineError: if the manifest is lost.
    """
    recorded = read_manifest(store)
    if recorded is None:
        if ledger.begun:
            raise damage_error(store, MANIFEST, "is missing, so nothing says what the cache was made of")
        return 0
    if recorded == manifest:
        return len(manifest["shards"])
    old, new = recorded.get("shards", []), manifest["shards"]
    fitting = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    others_equal = {**recorded, "shards": None} == {**manifest, "shards": None}
    if others_equal and not ledger.finished and ledger.next <= [fitting, 0]:
        return fitting
    raise UserError(
        f"{store.url} was built from something else: it is the cache {fingerprint(recorded)}, this configuration makes "
        f"{fingerprint(manifest)}.\n"
        + "\n".join(f"  {line}" for line in _find_differences(recorded, manifest))
        + f"\nSet data.cache_dir to another directory, or remove {store.url}"
    )


def claim_store(store: KvStore, manifest: Manifest, ledger: Ledger) -> None:
    """Claims the store for the cache of this manifest, and removes the parts of shards that have changed.

    Raises:
        UserError: see `count_matching_shards`.
    """
    fitting = count_matching_shards(store, manifest, ledger)
    if read_manifest(store) == manifest:
        return
    for key in [f"{directory}/{name}" for directory in ("shards", "parts") for name in store.list(directory)]:
        # Names of parts and of shards begin with the shard number in five digits.
        if int(key.rpartition("/")[2][:5]) >= fitting:
            store.delete(key)
    # Written last: if the process is killed earlier, the old manifest is still in place and the removal starts over.
    store.write_json(MANIFEST, manifest)


def _find_differences(recorded: Manifest, expected: Manifest) -> list[str]:
    lines = []
    for key in sorted((recorded.keys() | expected.keys()) - {"shards"}):
        old, new = recorded.get(key), expected.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
            lines += [f"{key}.{name}: the cache has {old.get(name)}, now {new.get(name)}" for name in names]
        elif old != new:
            lines.append(f"{key}: the cache has {old}, now {new}")
    old_shards, new_shards = recorded.get("shards", []), expected["shards"]
    for index, (old, new) in enumerate(zip(old_shards, new_shards, strict=False)):
        if old != new:
            # Only the first difference is described, because an added or removed file shifts every later shard.
            lines.append(_describe_shard_difference(index, old, new))
            break
    if len(old_shards) != len(new_shards):
        lines.append(f"shards: the cache has {len(old_shards)}, now {len(new_shards)}")
    return lines


def _describe_shard_difference(index: int, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    old_files = {file["url"]: file for file in old.get("files", [])}
    new_files = {file["url"]: file for file in new.get("files", [])}
    for url, file in new_files.items():
        if url in old_files and old_files[url] != file:
            previous = old_files[url]
            return (
                f"{url} has changed since: it had {previous['size']} bytes (version {previous['version']}), "
                f"now {file['size']} (version {file['version']})"
            )
    if added := sorted(new_files.keys() - old_files.keys()):
        return f"shard {index}: {added[0]} is not in the cache"
    if removed := sorted(old_files.keys() - new_files.keys()):
        return f"shard {index}: {removed[0]} is in the cache, but no longer asked for"
    return f"shard {index}: the cache has {old}, now {new}"
