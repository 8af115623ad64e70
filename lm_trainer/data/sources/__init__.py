"""Where documents come from. To add a source: one file, one line in the union."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, get_args

from pydantic import Field

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.base import BadRow, Row, Shard, SourceConfig, Split
from lm_trainer.data.sources.embedded import Embedded
from lm_trainer.data.sources.hub import HuggingFace
from lm_trainer.data.sources.jsonl import JsonLines
from lm_trainer.data.sources.memory import InMemory
from lm_trainer.data.sources.parquet import Parquet
from lm_trainer.data.sources.prebuilt import PrebuiltCache
from lm_trainer.data.sources.text import TextFiles
from lm_trainer.data.sources.urls import expand_braces, suffix

AnySource = Annotated[
    Embedded | HuggingFace | InMemory | JsonLines | Parquet | PrebuiltCache | TextFiles,
    Field(discriminator="type"),
]

SOURCES: tuple[type[SourceConfig], ...] = get_args(get_args(AnySource)[0])


def shards_of_urls(split: Split, urls: Sequence[str], text_key: str, fields: tuple[str, ...] = ()) -> list[Shard]:
    """Reads each URL by the source whose suffixes it has; order is that of the list.

    Raises:
        UserError: for a suffix that no source reads, naming those that exist.
    """
    names = [name for url in urls for name in expand_braces(url)]
    return [
        shard
        for source, run in groupby(names, lambda name: _source_of(name, split))
        for shard in checked_shards(source(), split, list(run), text_key, fields)
    ]


def checked_shards(
    source: SourceConfig, split: Split, urls: Sequence[str], text_key: str, fields: tuple[str, ...]
) -> list[Shard]:
    """The shards of a source, which must have the fields that are asked for.

    Raises:
        UserError: if its rows are bare text.
    """
    if fields and not source.has_fields:
        which = f"{urls[0]} is" if urls else "this source is"
        raise UserError(
            f"data.format reads the fields {', '.join(fields)}, but {which} text without fields; "
            "use JSON lines or Parquet, or remove data.format"
        )
    return source.shards(split, urls, text_key, fields)


def _source_of(url: str, split: Split) -> type[SourceConfig]:
    ending = suffix(url)
    for source in SOURCES:
        if ending in source.suffixes:
            return source
    known = ", ".join(ending for source in SOURCES for ending in source.suffixes)
    raise UserError(
        f"data.{split}_urls: cannot tell from its name how to read {url} (known: {known}); "
        "say it with data.source.type: text, jsonl or parquet"
    )


__all__ = [
    "SOURCES",
    "AnySource",
    "BadRow",
    "Row",
    "Shard",
    "SourceConfig",
    "Split",
    "checked_shards",
    "shards_of_urls",
]
