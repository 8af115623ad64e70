"""The format of a cache: what its files are called and what stands in them.

    manifest.json            what the cache is made of; its hash is the cache's identity
    parts/SSSSS-PPPPP.bin    token ids, raw little-endian u2 or u4: documents one after another, each ended by EOS
    parts/SSSSS-PPPPP.len    u4 per document (or piece of one): its tokens, EOS included
    parts/SSSSS-PPPPP.row    u4 per document: its row in the shard, counted from the part's first row
    parts/SSSSS-PPPPP.msk    two bits per token, where the format marks tokens: whether it is learnt, and whether it
                             ends a document (EOS may then also stand inside one); lowest bit first
    parts/SSSSS-PPPPP.json   the commit record, written last: what it does not list does not exist
    shards/SSSSS.json        written when a shard has been read to its end: the number of its parts
    ledger.json              the contiguous prefix of parts: all that a reader looks at
    builder.json             the heartbeat of who builds; gone when the cache is finished

Files are written whole and never changed, but for the ledger and the heartbeat, which are replaced whole. A part is cut
where the text of its rows passes a size, so its bytes depend on the source alone.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np

from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.data.cache.kvstore import Store, canonical_json
from lm_trainer.data.formats import FormatConfig
from lm_trainer.data.sources import Shard
from lm_trainer.data.tokenizer import Tokenizer

FORMAT = 1
MANIFEST, LEDGER, BUILDER = "manifest.json", "ledger.json", "builder.json"

RECORD_KEYS = frozenset(
    {
        *("shard", "part", "rows", "documents", "continues", "open", "text_bytes", "tokens"),
        *("empty", "replaced", "bad", "bad_examples", "blobs"),
    }
)
"""What a commit record holds."""

PART_BYTES = (1 << 20, 16 << 20)
"""Text bytes after which the first part of a shard is cut; doubles with each part up to the second figure."""


def part_name(shard: int, part: int) -> str:
    return f"{shard:05d}-{part:05d}"


def part_key(name: str, kind: str) -> str:
    return f"parts/{name}.{kind}"


def shard_key(shard: int) -> str:
    return f"shards/{shard:05d}.json"


def read_record(store: Store, name: str) -> dict[str, Any] | None:
    """The commit record of a part; None if it is not committed.

    Raises:
        MachineError: if it is not what was written.
    """
    record = store.read_json(part_key(name, "json"))
    if record is None or (isinstance(record, dict) and record.keys() >= RECORD_KEYS):
        return record
    raise damaged(store, part_key(name, "json"))


def damaged(store: Store, key: str, what: str = "is damaged") -> MachineError:
    """What to raise where a file of a cache is not as it was written."""
    return MachineError(f"{store.url}/{key} {what}; remove {store.url} to build it again")


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def make_manifest(
    shards: list[Shard],
    tokenizer: Tokenizer,
    part_bytes: tuple[int, int] = PART_BYTES,
    format: FormatConfig | None = None,
) -> dict[str, Any]:
    """Everything that decides the bytes of a cache."""
    written = format and format.identity(tokenizer)
    return {
        **({"document": written} if written else {}),
        "format": FORMAT,
        "tokenizer": tokenizer.fingerprint(),
        "dtype": token_dtype(tokenizer.vocab_size).str,
        "text": {"special_tokens": "plain", "lone_surrogates": "U+FFFD", "empty": "skipped", "eos": "after each"},
        "part_bytes": list(part_bytes),
        "shards": [shard.identity() for shard in shards],
    }


def fingerprint(value: Any) -> str:
    """Sixteen hex digits that identify a JSON value."""
    return hashlib.sha256(canonical_json(value)).hexdigest()[:16]


def check_manifest(store: Store, manifest: dict[str, Any], ledger: Ledger) -> int:
    """How many leading shards of the cache fit the manifest: all of them, unless sources changed before they counted.

    A shard none of whose parts the ledger lists has never been read, so it may be built again from what is there now.

    Raises:
        UserError: if the store is the cache of something else; says what differs.
        MachineError: if it does not say what it is the cache of.
    """
    found = store.read_json(MANIFEST)
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


def claim(store: Store, manifest: dict[str, Any], ledger: Ledger) -> None:
    """Makes the store the cache of this manifest, and removes what was built of shards that have changed.

    Raises:
        UserError: as `check_manifest` does.
    """
    fitting = check_manifest(store, manifest, ledger)
    if store.read_json(MANIFEST) == manifest:
        return
    for key in [*store.list("shards/"), *store.list("parts/")]:
        if int(key.rpartition("/")[2][:5]) >= fitting:
            store.delete(key)
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


@dataclass
class Ledger:
    """The contiguous prefix of committed parts, in the order of the stream."""

    format: int = FORMAT
    parts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    """Documents that end in the part."""
    text_bytes: list[int] = field(default_factory=list)
    sha256: list[str] = field(default_factory=list)
    """Of the token file of each part, together with its mask file where there is one."""
    rows: int = 0
    empty: int = 0
    bad: int = 0
    bad_examples: list[str] = field(default_factory=list)
    marks: bool = False
    """Whether the parts have mask files."""
    next: list[int] = field(default_factory=lambda: [0, 0])
    """Shard and part that come next."""
    finished: bool = False

    @classmethod
    def read(cls, store: Store) -> Self:
        """The ledger that is kept; an empty one, if there is none.

        Raises:
            UserError: if it is damaged, or was written by another version.
        """
        found = store.read_json(LEDGER)
        if found is None:
            return cls()
        if not isinstance(found, dict) or "format" not in found:
            raise damaged(store, LEDGER)
        if found["format"] != FORMAT:
            raise UserError(
                f"{store.url} has the format {found['format']}, this version reads {FORMAT}; "
                "set data.cache_dir to another directory"
            )
        try:
            ledger = cls(**found)
        except TypeError:
            raise damaged(store, LEDGER) from None
        if len({len(each) for each in (ledger.parts, ledger.tokens, ledger.documents, ledger.sha256)}) != 1:
            raise damaged(store, LEDGER)
        return ledger

    def advance(self, store: Store, num_shards: int) -> bool:
        """Takes in what has been committed since; True if there was anything."""
        before = list(self.next)
        while self.next[0] < num_shards:
            name = part_name(*self.next)
            record = read_record(store, name)
            if record is not None:
                self._append(name, record)
                self.next[1] += 1
                continue
            done = store.read_json(shard_key(self.next[0]))
            if done is None or done["parts"] != self.next[1]:
                break
            self.next = [self.next[0] + 1, 0]
        return self.next != before

    def _append(self, name: str, record: dict[str, Any]) -> None:
        self.parts.append(name)
        self.tokens.append(record["tokens"])
        self.documents.append(record["documents"])
        self.text_bytes.append(record["text_bytes"])
        tokens, marks = record["blobs"]["bin"]["sha256"], record["blobs"].get("msk")
        self.sha256.append(fingerprint([tokens, marks["sha256"]]) if marks else tokens)
        self.marks = "msk" in record["blobs"]
        self.rows += record["rows"][1] - record["rows"][0]
        self.empty += record["empty"]
        self.bad += record["bad"]
        self.bad_examples = (self.bad_examples + record["bad_examples"])[:5]

    def write(self, store: Store) -> None:
        """Keeps the ledger, unless the one that is kept is as far: of two builders at once, one may be behind."""
        while True:
            found, generation = store.read_versioned(LEDGER)
            if found is not None and self._progress <= Ledger(**json.loads(found))._progress:
                return
            if store.write_json(LEDGER, asdict(self), if_generation=generation):
                return

    @property
    def begun(self) -> bool:
        """Whether anything was taken in."""
        return self.finished or self.next != [0, 0]

    @property
    def _progress(self) -> tuple[bool, list[int]]:
        return self.finished, self.next

    def copy(self) -> Self:
        """One that stays as it is while this one advances."""
        return type(self)(**asdict(self))

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens)

    @property
    def num_documents(self) -> int:
        return sum(self.documents)
