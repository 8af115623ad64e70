"""A finished cache that is used as a source instead of the original text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from lm_trainer.core.errors import UserError
from lm_trainer.data.cache.format import fingerprint, read_manifest
from lm_trainer.data.cache.kvstore import CachePath, KvStore
from lm_trainer.data.sources.base import BadRow, Row, Shard, SourceConfig, Split


class PrebuiltCache(SourceConfig):
    """A finished cache that was copied or is shared. The original text is not needed.

    `data.tokenizer` must be the tokenizer that built the cache. By default, it is read from the cache directory.
    """

    type: Literal["cache"] = "cache"
    path: CachePath
    """The directory or URL with `train/` and, optionally, `validation/`. This is the `data.cache_dir` of the
    configuration that built the cache."""

    takes_urls: ClassVar[bool] = False
    has_fields: ClassVar[bool] = False

    def shards(
        self, split: Split, urls: Sequence[str] = (), text_key: str = "text", fields: tuple[str, ...] = ()
    ) -> list[Shard]:
        del urls, text_key, fields
        store = KvStore(f"{self.path}/{split}")
        manifest = read_manifest(store)
        if manifest is not None:
            return [CacheShard(store.url, fingerprint(manifest))]
        if split == "train":
            raise UserError(f"data.source.path: {store.url} holds no cache; build one with: lmt data build")
        return []


@dataclass(frozen=True)
class CacheShard:
    """All rows of a cache. The original rows cannot be read, but can be referred to by name."""

    url: str
    fingerprint: str

    @property
    def size(self) -> int:
        return 0

    @property
    def text_size(self) -> int | None:
        return None

    def identity(self) -> dict[str, object]:
        return {"type": "cache", "fingerprint": self.fingerprint}

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        # The row has no text, because it is only used to name the origin of a document.
        yield Row(start, f"row {start} of what {self.url} was built from", "")
