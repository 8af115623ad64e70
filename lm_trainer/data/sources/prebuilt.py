"""Finished cache as a source, in place of the text it was made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lm_trainer.core.errors import UserError
from lm_trainer.data.cache.format import fingerprint, read_manifest
from lm_trainer.data.cache.kvstore import CachePath, KvStore
from lm_trainer.data.sources.base import BadRow, Row, Shard, SourceConfig, Split


class PrebuiltCache(SourceConfig):
    """Finished cache, copied here or shared; the text that it was made of need not be there.

    `data.tokenizer` must be the one that it was built with; if absent, it is the one that lies beside the cache.
    """

    type: Literal["cache"] = "cache"
    path: CachePath
    """The directory or URL that holds `train/` and, if there is one, `validation/`: the `data.cache_dir` of the
    configuration that built it."""

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
    """All of a cache. Its rows cannot be read again, but they can be named."""

    url: str
    fingerprint: str

    @property
    def size(self) -> int:
        return 0

    @property
    def text_size(self) -> int | None:
        return None

    def identity(self) -> dict[str, Any]:
        return {"type": "cache", "fingerprint": self.fingerprint}

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        # Without text: the row is only asked for to name the origin of a document.
        yield Row(start, f"row {start} of what {self.url} was built from", "")
