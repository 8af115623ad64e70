"""The ledger of a cache, which lists the parts available to readers, in order."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Self

from lm_trainer.core.errors import UserError
from lm_trainer.data.cache.format import (
    FORMAT,
    LEDGER,
    PART_NAME,
    CommitRecord,
    damage_error,
    fingerprint,
    parse_json,
    part_name,
    read_num_parts,
    read_record,
    shard_key,
)
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.token_location import TokenLocation


@dataclass
class Ledger:
    """The contiguous prefix of committed parts, in stream order.

    The field names are the keys of `ledger.json`. Except for `next`, the lists have one item per part.
    """

    format: int = FORMAT
    parts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    """Number of documents that end in each part."""
    text_bytes: list[int] = field(default_factory=list)
    sha256: list[str] = field(default_factory=list)
    """Hash of each part's token file, combined with its mask and feature files if any."""
    rows: int = 0
    empty: int = 0
    bad: int = 0
    bad_examples: list[str] = field(default_factory=list)
    marks: bool = False
    """True if the parts have loss masks."""
    places: list[list[Any]] = field(default_factory=list)
    """The location of each part's tokens, if they stay in their original files. See `TokenLocation`."""
    next: list[int] = field(default_factory=lambda: [0, 0])
    """Numbers of the next shard and of the next part within it."""
    finished: bool = False

    @classmethod
    def read(cls, store: KvStore) -> Self:
        """Reads the ledger of a cache. Returns an empty ledger if there is none.

        Raises:
            UserError: if the ledger is damaged, or was written by another version.
        """
        content = store.read(LEDGER)
        return cls() if content is None else cls.from_bytes(store, content)

    @classmethod
    def from_bytes(cls, store: KvStore, content: bytes) -> Self:
        """Parses the content of the ledger file. Otherwise like `read`."""
        fields = parse_json(store, LEDGER, content)
        if not isinstance(fields, dict) or "format" not in fields:
            raise damage_error(store, LEDGER)
        if fields["format"] != FORMAT:
            raise UserError(
                f"{store.url} has the format {fields['format']}, this version reads {FORMAT}; "
                "set data.cache_dir to another directory"
            )
        try:
            ledger = cls(**fields)
        except TypeError:
            raise damage_error(store, LEDGER) from None
        lists = [
            ledger.parts,
            ledger.tokens,
            ledger.documents,
            ledger.sha256,
            *([ledger.places] if ledger.places else []),
        ]
        # The names are checked because they become keys and thus paths.
        named = all(isinstance(name, str) and PART_NAME.fullmatch(name) for name in ledger.parts)
        if len({len(column) for column in lists}) != 1 or not named:
            raise damage_error(store, LEDGER)
        return ledger

    def advance(self, store: KvStore, num_shards: int) -> bool:
        """Adds newly committed parts. Returns True if there were any."""
        previous = list(self.next)
        while self.next[0] < num_shards:
            name = part_name(*self.next)
            record = read_record(store, name)
            if record is not None:
                self._append_part(name, record)
                self.next[1] += 1
                continue
            # Shards are built concurrently, but a shard's parts are added only once the previous shard is complete,
            # because the order of the stream must not depend on the speed of the workers.
            count = read_num_parts(store, self.next[0])
            if count is None:
                break
            if count == self.next[1]:
                self.next = [self.next[0] + 1, 0]
            # The part may have been committed in the meantime.
            elif count < self.next[1] or read_record(store, name) is None:
                raise damage_error(store, shard_key(self.next[0]), f"says {count} parts, and there are {self.next[1]}")
        return self.next != previous

    def _append_part(self, name: str, record: CommitRecord) -> None:
        self.parts.append(name)
        self.tokens.append(record["tokens"])
        self.documents.append(record["documents"])
        self.text_bytes.append(record["text_bytes"])
        if "place" in record:
            self.places.append(_token_location_fields(record))
        self.sha256.append(_hash_part(record))
        self.marks = "msk" in record["blobs"]
        self.rows += record["rows"][1] - record["rows"][0]
        self.empty += record["empty"]
        self.bad += record["bad"]
        self.bad_examples = (self.bad_examples + record["bad_examples"])[:5]

    def matches_record(self, part: int, record: CommitRecord) -> bool:
        """Returns True if the commit record matches the part at index `part` of the ledger."""
        try:
            counts = [record["tokens"], record["documents"]] == [self.tokens[part], self.documents[part]]
            places = not self.places or _token_location_fields(record) == self.places[part]
            has_hashes = all(isinstance(record["blobs"][kind]["sha256"], str) for kind in ("len", "row"))
            return counts and places and has_hashes and _hash_part(record) == self.sha256[part]
        except (KeyError, TypeError, AttributeError):
            return False

    def write(self, store: KvStore) -> None:
        """Writes the ledger, unless the stored one has at least as many parts, as a faster concurrent builder's may."""
        while True:
            content, generation = store.read_versioned(LEDGER)
            if content is not None and self._progress <= Ledger.from_bytes(store, content)._progress:
                return
            # The write is refused if another builder wrote in the meantime. Then its ledger is compared.
            if store.write_json(LEDGER, self._to_json(), if_generation=generation):
                return

    def _to_json(self) -> dict[str, object]:
        content = asdict(self)
        # Omitted in the usual case, in which the parts hold their own tokens.
        return content if self.places else {key: value for key, value in content.items() if key != "places"}

    @property
    def begun(self) -> bool:
        """True once any part has been added."""
        return self.finished or self.next != [0, 0]

    @property
    def _progress(self) -> tuple[bool, list[int]]:
        return self.finished, self.next

    def copy(self) -> Self:
        """Returns a copy that stays unchanged while this ledger advances."""
        return type(self)(**asdict(self))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all parts."""
        return sum(self.tokens)

    @property
    def num_documents(self) -> int:
        """Number of documents that end in any part."""
        return sum(self.documents)


def _token_location_fields(record: CommitRecord) -> list[object]:
    """Returns the fields of the `TokenLocation` in a commit record."""
    return [record["place"][name] for name in TokenLocation._fields]


def _hash_part(record: CommitRecord) -> str:
    """Returns the hash of a commit record's token file, combined with its mask and feature files."""
    blobs = record["blobs"]
    tokens = (record["place"] if "place" in record else blobs["bin"])["sha256"]
    other_hashes = [blobs[kind]["sha256"] for kind in ("msk", "fea") if kind in blobs]
    return fingerprint([tokens, *other_hashes]) if other_hashes else tokens
