"""Documents that are passed from Python as a list."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from lm_trainer.data.sources.base import BadRow, Row, Shard, SourceConfig, Split, read_record

MemoryDocument = str | dict[str, Any]


class InMemory(SourceConfig):
    """A list of documents, which are texts or objects with the fields named by `data.text_key` or `data.format`."""

    type: Literal["memory"] = "memory"
    train: list[MemoryDocument] = Field(min_length=1)
    """The training documents."""
    validation: list[MemoryDocument] = []
    """The validation documents."""

    takes_urls: ClassVar[bool] = False

    def shards(
        self, split: Split, urls: Sequence[str] = (), text_key: str = "text", fields: tuple[str, ...] = ()
    ) -> list[Shard]:
        del urls
        documents = self.train if split == "train" else self.validation
        return [MemoryShard(tuple(documents), text_key, fields, split)] if documents else []


@dataclass(frozen=True)
class MemoryShard:
    """All documents of a split. Each row is a document."""

    documents: tuple[MemoryDocument, ...]
    text_key: str
    fields: tuple[str, ...]
    split: Split

    @property
    def size(self) -> int:
        return len(self._to_bytes())

    @property
    def text_size(self) -> int | None:
        return sum(len(d.encode("utf-8", "replace")) for d in self.documents if isinstance(d, str)) or None

    def identity(self) -> dict[str, object]:
        keys = {"fields": list(self.fields)} if self.fields else {"text_key": self.text_key}
        digest = hashlib.sha256(self._to_bytes()).hexdigest()
        return {"type": "memory", **keys, "documents": len(self.documents), "sha256": digest}

    def _to_bytes(self) -> bytes:
        return json.dumps(self.documents).encode()

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        for number, document in enumerate(self.documents[start:], start):
            location = f"data.source.{self.split}[{number}]"
            if isinstance(document, str) and not self.fields:
                yield Row(number, location, document)
            else:
                yield read_record(document, self.text_key, self.fields)._replace(number=number, where=location)
