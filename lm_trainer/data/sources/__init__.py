"""Sources of documents. To add a source, write one file and add one line to the union."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, get_args

from pydantic import Field

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.array_record import ArrayRecordFiles
from lm_trainer.data.sources.arrow import ArrowFiles
from lm_trainer.data.sources.audio_files import AudioFiles
from lm_trainer.data.sources.base import BadRow, FileSource, Row, Shard, SourceConfig, Split, refuse_archive
from lm_trainer.data.sources.compression import UNPACKED, file_suffix
from lm_trainer.data.sources.csv_files import CsvFiles
from lm_trainer.data.sources.embedded import Embedded
from lm_trainer.data.sources.embedded_pairs import EmbeddedPairs
from lm_trainer.data.sources.files import File
from lm_trainer.data.sources.grain_pipeline import GrainPipeline
from lm_trainer.data.sources.hub import HuggingFace
from lm_trainer.data.sources.in_memory import InMemory
from lm_trainer.data.sources.jsonl import JsonLines
from lm_trainer.data.sources.levanter import LevanterCache
from lm_trainer.data.sources.megatron import Megatron
from lm_trainer.data.sources.morse import Morse
from lm_trainer.data.sources.parquet import Parquet
from lm_trainer.data.sources.prebuilt import PrebuiltCache
from lm_trainer.data.sources.text import TextFiles
from lm_trainer.data.sources.token_files import TokenFiles
from lm_trainer.data.sources.tokens import TokenFileSource
from lm_trainer.data.sources.urls import match_files
from lm_trainer.data.sources.web_dataset import WebDataset

AnySource = Annotated[
    ArrayRecordFiles
    | ArrowFiles
    | AudioFiles
    | CsvFiles
    | Embedded
    | EmbeddedPairs
    | GrainPipeline
    | HuggingFace
    | InMemory
    | JsonLines
    | LevanterCache
    | Megatron
    | Morse
    | Parquet
    | PrebuiltCache
    | TextFiles
    | TokenFiles
    | WebDataset,
    Field(discriminator="type"),
]

SOURCES: tuple[type[SourceConfig], ...] = get_args(get_args(AnySource)[0])

_FILE_SOURCES = [source for source in SOURCES if issubclass(source, FileSource)]


def list_shards(split: Split, urls: Sequence[str], text_key: str, fields: tuple[str, ...] = ()) -> list[Shard]:
    """Lists the shards of files, in order. Each file is read by the source that its suffix selects.

    Raises:
        UserError: if files are missing, a suffix is unknown (lists the known ones), a glob matches files of several
            sources, or token files and text files are mixed.
    """
    matches = [
        (_find_source(name, files, split), file)
        for name, files in match_files(urls, f"data.{split}_urls")
        for file in files
    ]
    # A cache either holds all of its tokens itself, or refers to token files for all of them.
    tokens = [file.name for source, file in matches if issubclass(source, TokenFileSource)]
    if 0 < len(tokens) < len(matches):
        raise UserError(
            f"data.{split}_urls: {tokens[0]} is a file of tokens, which does not go into one set with files of text; "
            "make a set of each, below data.configs"
        )
    shards: list[Shard] = []
    # Group only consecutive files, since grouping must not change the order of documents.
    for source, run in groupby(matches, lambda pair: pair[0]):
        files = [file for _, file in run]
        refuse_archive(files[0], split, reads_archives=bool(fields))
        _check_fields(source, files[0].name, fields)
        shards += source().shards_of_files(files, text_key, fields)
    return shards


def list_source_shards(
    source: SourceConfig, split: Split, urls: Sequence[str], text_key: str, fields: tuple[str, ...]
) -> list[Shard]:
    """Lists the shards of a source, and checks that it can provide the requested fields.

    Raises:
        UserError: if fields are requested, but the rows of the source are bare text.
    """
    _check_fields(type(source), urls[0] if urls else "this source", fields)
    return source.shards(split, urls, text_key, fields)


def _check_fields(source: type[SourceConfig], source_name: str, fields: tuple[str, ...]) -> None:
    if fields and not source.has_fields:
        raise UserError(
            f"data.format reads the fields {', '.join(fields)}, but {source_name} is text without fields; "
            "use JSON lines or Parquet, or remove data.format"
        )


def _find_source(name: str, files: Sequence[File], split: Split) -> type[FileSource]:
    """Returns the source for the files of one path, URL or glob."""
    sources = {_find_source_of_file(file, split): file for file in files}
    if len(sources) > 1:
        first, second, *_ = sources.values()
        raise UserError(
            f"data.{split}_urls: {name} matches files that are read in different ways, {first.name} and {second.name}; "
            "list them apart, such as *.jsonl and *.txt, or say how to read them with data.source.type"
        )
    return next(iter(sources))


def _find_source_of_file(file: File, split: Split) -> type[FileSource]:
    ending = file_suffix(file.url)
    for source in _FILE_SOURCES:
        if ending in source.suffixes:
            return source
    known_endings = ", ".join(ending for source in _FILE_SOURCES for ending in source.suffixes)
    raise UserError(
        f"data.{split}_urls: cannot tell from its name how to read {file.name} (known: {known_endings}; "
        f"packed: {UNPACKED}); say it with data.source.type: "
        f"{', '.join(source.model_fields['type'].default for source in _FILE_SOURCES)}"
    )


__all__ = [
    "SOURCES",
    "AnySource",
    "BadRow",
    "FileSource",
    "Row",
    "Shard",
    "SourceConfig",
    "Split",
    "list_shards",
    "list_source_shards",
]
