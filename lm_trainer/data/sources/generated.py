"""Sources whose rows are made from words of the embedded corpus and random numbers, on the fly."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

from lm_trainer.data.sources.base import BadRow, Row, Split
from lm_trainer.data.sources.embedded import Embedded

_SHARD_ROWS = 1024
_CORPUS_BYTES = 4 << 20


class GeneratedSource(Protocol):
    """Settings that every source of this kind has."""

    @property
    def rows(self) -> int:
        """Number of training rows."""
        ...

    @property
    def validation_rows(self) -> int:
        """Number of validation rows."""
        ...

    @property
    def seed(self) -> int:
        """Seed of all rows."""
        ...

    def model_dump(self, *, mode: str, exclude: set[str]) -> dict[str, Any]:
        """Returns the settings as JSON."""
        ...


@dataclass(frozen=True)
class GeneratedShard(ABC):
    """The rows [start, stop) of a split."""

    source: GeneratedSource
    split: Split
    start: int
    stop: int
    fields: tuple[str, ...]

    @classmethod
    def make_all(cls, source: Any, split: Split, fields: tuple[str, ...]) -> list[Self]:
        """Makes the shards of a split of `source`, in order."""
        count = source.rows if split == "train" else source.validation_rows
        starts = range(0, count, _SHARD_ROWS)
        return [cls(source, split, start, min(start + _SHARD_ROWS, count), fields) for start in starts]

    @property
    @abstractmethod
    def size(self) -> int: ...

    @property
    def text_size(self) -> None:
        return None

    @abstractmethod
    def corpus(self) -> str:
        """Returns the text that the rows are made from."""

    @abstractmethod
    def make_row(self, index: int, rng: np.random.Generator) -> Row | BadRow:
        """Makes row number `index` of the split from its own random numbers, without a location."""

    def identity(self) -> dict[str, object]:
        return {
            **self.source.model_dump(mode="json", exclude={"rows", "validation_rows"}),
            "split": self.split,
            "rows": [self.start, self.stop],
            "fields": list(self.fields),
            "sha256": hashlib.sha256(self.corpus().encode()).hexdigest(),
        }

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        for index in range(self.start + start, self.stop):
            # Seeded with the row number, so that every row can be made independently.
            key = (self.source.seed, 2 * index + (self.split == "validation"))
            row = self.make_row(index, np.random.Generator(np.random.Philox(key=key)))
            yield row._replace(number=index - self.start, where=f"data.source.{self.split}[{index}]")


def read_embedded_text(split: Split) -> str:
    """Returns a part of the embedded corpus as one text."""
    shards = Embedded(max_bytes=_CORPUS_BYTES).shards(split)
    return "\n".join(row.text for shard in shards for row in shard.rows() if isinstance(row, Row))
