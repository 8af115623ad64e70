"""Manifest of a cache: everything that decides its bytes, and the comparison with the manifest that is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.data.cache.format import FORMAT, MANIFEST, PART_BYTES, damaged, fingerprint, read_manifest, token_dtype
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.formats import FormatConfig
from lm_trainer.data.sources import Shard
from lm_trainer.data.tokenizer import Tokenizer


def make_manifest(
    shards: Sequence[Shard],
    tokenizer: Tokenizer,
    part_bytes: tuple[int, int] = PART_BYTES,
    format: FormatConfig | None = None,
) -> dict[str, Any]:
    """Lists everything that decides the bytes of a cache."""
    identity = format and format.identity(tokenizer)
    return {
        # Absent for plain text: with the key, even an empty one, the identity of such a cache would be another.
        **({"document": identity} if identity else {}),
        "format": FORMAT,
        "tokenizer": tokenizer.fingerprint(),
        "dtype": token_dtype(tokenizer.vocab_size).str,
        "text": {"special_tokens": "plain", "lone_surrogates": "U+FFFD", "empty": "skipped", "eos": "after each"},
        "part_bytes": list(part_bytes),
        "shards": [shard.identity() for shard in shards],
    }


def check_manifest(store: KvStore, manifest: dict[str, Any], ledger: Ledger) -> int:
    """Counts the leading shards of the cache that fit the manifest.

    All of them do, unless sources changed before they counted: a shard none of whose parts the ledger lists has never
    been read, so it may be built again from its present files.

    Raises:
        UserError: if the store is the cache of something else; says which entries differ.
        MachineError: if the manifest is lost.
    """
    found = read_manifest(store)
    if found is None:
        if ledger.begun:
            raise damaged(store, MANIFEST, "is missing, so nothing says what the cache was made of")
        return 0
    if found == manifest:
        return len(manifest["shards"])
    old, new = found.get("shards", []), manifest["shards"]
    fitting = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    rest_equal = {**found, "shards": None} == {**manifest, "shards": None}
    if rest_equal and not ledger.finished and ledger.next <= [fitting, 0]:
        return fitting
    raise UserError(
        f"{store.url} was built from something else: it is the cache {fingerprint(found)}, this configuration makes "
        f"{fingerprint(manifest)}.\n"
        + "\n".join(f"  {line}" for line in _differences(found, manifest))
        + f"\nSet data.cache_dir to another directory, or remove {store.url}"
    )


def claim(store: KvStore, manifest: dict[str, Any], ledger: Ledger) -> None:
    """Makes the store the cache of this manifest, and removes all that was built of shards that have changed.

    Raises:
        UserError: as `check_manifest` does.
    """
    fitting = check_manifest(store, manifest, ledger)
    if read_manifest(store) == manifest:
        return
    for key in [f"{directory}/{name}" for directory in ("shards", "parts") for name in store.list(directory)]:
        # The names of parts and of shards both begin with the number of the shard in five digits.
        if int(key.rpartition("/")[2][:5]) >= fitting:
            store.delete(key)
    # Last: a kill before this leaves the old manifest, with which the removal begins anew.
    store.write_json(MANIFEST, manifest)


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    lines = []
    for key in sorted((found.keys() | wanted.keys()) - {"shards"}):
        old, new = found.get(key), wanted.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
            lines += [f"{key}.{name}: the cache has {old.get(name)}, now {new.get(name)}" for name in names]
        elif old != new:
            lines.append(f"{key}: the cache has {old}, now {new}")
    old_shards, new_shards = found.get("shards", []), wanted["shards"]
    for index, (old, new) in enumerate(zip(old_shards, new_shards, strict=False)):
        if old != new:
            # The first alone: a file that was added or removed shifts every shard after it.
            lines.append(_shard_difference(index, old, new))
            break
    if len(old_shards) != len(new_shards):
        lines.append(f"shards: the cache has {len(old_shards)}, now {len(new_shards)}")
    return lines


def _shard_difference(index: int, old: dict[str, Any], new: dict[str, Any]) -> str:
    before = {file["url"]: file for file in old.get("files", [])}
    after = {file["url"]: file for file in new.get("files", [])}
    for url, file in after.items():
        if url in before and before[url] != file:
            was = before[url]
            return (
                f"{url} has changed since: it had {was['size']} bytes (version {was['version']}), "
                f"now {file['size']} (version {file['version']})"
            )
    if added := sorted(after.keys() - before.keys()):
        return f"shard {index}: {added[0]} is not in the cache"
    if removed := sorted(before.keys() - after.keys()):
        return f"shard {index}: {removed[0]} is in the cache, but no longer asked for"
    return f"shard {index}: the cache has {old}, now {new}"
