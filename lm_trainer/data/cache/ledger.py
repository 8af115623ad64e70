"""Ledger of a cache: the parts that readers may use, in their order."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Self

from lm_trainer.core.errors import UserError
from lm_trainer.data.cache.format import (
    FORMAT,
    LEDGER,
    PART_NAME,
    damaged,
    fingerprint,
    parsed,
    part_name,
    parts_of_shard,
    read_record,
    shard_key,
)
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.token_place import TokenPlace


@dataclass
class Ledger:
    """The contiguous prefix of committed parts, in the order of the stream.

    The names of the fields are the keys of `ledger.json`. The lists have one item for each part.
    """

    format: int = FORMAT
    parts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    """Documents that end in the part."""
    text_bytes: list[int] = field(default_factory=list)
    sha256: list[str] = field(default_factory=list)
    """The hash of the token file of each part, together with its files of masks and features where there are any."""
    rows: int = 0
    empty: int = 0
    bad: int = 0
    bad_examples: list[str] = field(default_factory=list)
    marks: bool = False
    """True if the parts have loss masks."""
    places: list[list[Any]] = field(default_factory=list)
    """The place of the tokens of each part, where they stay in the files that they were found in: see `TokenPlace`."""
    next: list[int] = field(default_factory=lambda: [0, 0])
    """Shard and part that come next."""
    finished: bool = False

    @classmethod
    def read(cls, store: KvStore) -> Self:
        """Reads the ledger of a cache; an empty one, if there is none.

        Raises:
            UserError: if it is damaged, or was written by another version.
        """
        content = store.read(LEDGER)
        return cls() if content is None else cls.parsed(store, content)

    @classmethod
    def parsed(cls, store: KvStore, content: bytes) -> Self:
        """As `read`, of the content of the file."""
        fields = parsed(store, LEDGER, content)
        if not isinstance(fields, dict) or "format" not in fields:
            raise damaged(store, LEDGER)
        if fields["format"] != FORMAT:
            raise UserError(
                f"{store.url} has the format {fields['format']}, this version reads {FORMAT}; "
                "set data.cache_dir to another directory"
            )
        try:
            ledger = cls(**fields)
        except TypeError:
            raise damaged(store, LEDGER) from None
        lists = [
            ledger.parts,
            ledger.tokens,
            ledger.documents,
            ledger.sha256,
            *([ledger.places] if ledger.places else []),
        ]
        # The names become keys, and so paths.
        named = all(isinstance(name, str) and PART_NAME.fullmatch(name) for name in ledger.parts)
        if len({len(each) for each in lists}) != 1 or not named:
            raise damaged(store, LEDGER)
        return ledger

    def advance(self, store: KvStore, num_shards: int) -> bool:
        """Takes in the parts that were committed since; returns True if there were any."""
        before = list(self.next)
        while self.next[0] < num_shards:
            name = part_name(*self.next)
            record = read_record(store, name)
            if record is not None:
                self._append(name, record)
                self.next[1] += 1
                continue
            # Shards are built at the same time, but only a shard that is known to be complete lets the next one begin:
            # the order of the stream must not depend on which worker was quicker.
            count = parts_of_shard(store, self.next[0])
            if count is None:
                break
            if count == self.next[1]:
                self.next = [self.next[0] + 1, 0]
            # The part may have been committed since it was looked for.
            elif count < self.next[1] or read_record(store, name) is None:
                raise damaged(store, shard_key(self.next[0]), f"says {count} parts, and there are {self.next[1]}")
        return self.next != before

    def _append(self, name: str, record: dict[str, Any]) -> None:
        self.parts.append(name)
        self.tokens.append(record["tokens"])
        self.documents.append(record["documents"])
        self.text_bytes.append(record["text_bytes"])
        if "place" in record:
            self.places.append(_place(record))
        self.sha256.append(_digest(record))
        self.marks = "msk" in record["blobs"]
        self.rows += record["rows"][1] - record["rows"][0]
        self.empty += record["empty"]
        self.bad += record["bad"]
        self.bad_examples = (self.bad_examples + record["bad_examples"])[:5]

    def fits(self, part: int, record: dict[str, Any]) -> bool:
        """Returns whether a commit record is the one of which part number `part` was taken in."""
        try:
            counts = [record["tokens"], record["documents"]] == [self.tokens[part], self.documents[part]]
            places = not self.places or _place(record) == self.places[part]
            noted = all(isinstance(record["blobs"][kind]["sha256"], str) for kind in ("len", "row"))
            return counts and places and noted and _digest(record) == self.sha256[part]
        except (KeyError, TypeError, AttributeError):
            return False

    def write(self, store: KvStore) -> None:
        """Writes the ledger, unless the one in the store is as far: of two builders at once, one may be behind."""
        while True:
            found, generation = store.read_versioned(LEDGER)
            if found is not None and self._progress <= Ledger.parsed(store, found)._progress:
                return
            # Refused if another builder wrote meanwhile; then its ledger is compared anew.
            if store.write_json(LEDGER, self._content(), if_generation=generation):
                return

    def _content(self) -> dict[str, Any]:
        content = asdict(self)
        # Absent where parts hold their tokens, as nearly all do.
        return content if self.places else {key: value for key, value in content.items() if key != "places"}

    @property
    def begun(self) -> bool:
        """True once anything was taken in."""
        return self.finished or self.next != [0, 0]

    @property
    def _progress(self) -> tuple[bool, list[int]]:
        return self.finished, self.next

    def copy(self) -> Self:
        """Returns a ledger that stays as it is while this one advances."""
        return type(self)(**asdict(self))

    @property
    def num_tokens(self) -> int:
        """Tokens of all parts."""
        return sum(self.tokens)

    @property
    def num_documents(self) -> int:
        """Documents that end in some part."""
        return sum(self.documents)


def _place(record: dict[str, Any]) -> list[Any]:
    """Returns the `TokenPlace` of a commit record."""
    return [record["place"][name] for name in TokenPlace._fields]


def _digest(record: dict[str, Any]) -> str:
    """Hashes the token file of a commit record together with its files of masks and features."""
    blobs = record["blobs"]
    tokens = (record["place"] if "place" in record else blobs["bin"])["sha256"]
    beside = [blobs[kind]["sha256"] for kind in ("msk", "fea") if kind in blobs]
    return fingerprint([tokens, *beside]) if beside else tokens
