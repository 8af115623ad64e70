"""WebDataset: tar archives in which files with the same name and different endings form a sample."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from lm_trainer.data.sources.base import BadRow, FileShard, FileSource, Row, Shard, make_bad_row, read_record
from lm_trainer.data.sources.files import File, group_files, number_items
from lm_trainer.data.sources.tar import open_tar

_Sample = dict[str, bytes | BadRow | None]
"""Contents of a sample's files, keyed by file name ending; None for unused files."""


class WebDataset(FileSource):
    """Tar archives of samples: `0001.txt`, `0001.json`, ... A sample is a record with the endings as fields.

    `data.text_key` is, for example, `txt`, or `json.caption` for a field of the JSON file. Other files, such as images,
    are skipped.
    """

    type: Literal["webdataset"] = "webdataset"

    # Has no `suffixes`, so the configuration must name it. By default, archives are read as recordings.
    reads_archives: ClassVar[bool] = True

    def shards_of_files(self, files: Sequence[File], text_key: str, fields: tuple[str, ...]) -> list[Shard]:
        return [WebDatasetShard(run, text_key, fields) for run in group_files(files)]


class WebDatasetShard(FileShard):
    """One or more archives, in order. Each row is a sample."""

    def reader_identity(self) -> dict[str, object]:
        return {"type": "webdataset"}

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        files = (self._iter_samples(file) for file in self.files)
        for number, (location, sample) in number_items(files, start):
            row = sample if isinstance(sample, BadRow) else read_record(sample, self.text_key, self.fields)
            yield row._replace(number=number, where=location)

    def _iter_samples(self, file: File) -> Iterator[tuple[str, dict[str, object] | BadRow]]:
        """Yields (location, fields by ending) for every run of files with the same name."""
        key, sample = None, _Sample()
        for name, ending, content in self._iter_members(file):
            if key is not None and name != key:
                yield f"{file.name}:{key}", _decode_sample(sample)
                sample = {}
            key = name
            sample[ending] = make_bad_row(f"two files end in .{ending}") if ending in sample else content
        if key is not None:
            yield f"{file.name}:{key}", _decode_sample(sample)

    def _iter_members(self, file: File) -> Iterator[tuple[str, str, bytes | BadRow | None]]:
        """Yields (key, ending, content) for every file or link. The content is None for unused endings."""
        used_endings = {part for name in self.read_fields for part in (name, name.partition(".")[0])}
        with open_tar(file) as archive:
            for member in archive:
                directory, slash, name = member.name.rpartition("/")
                stem, dot, ending = name.partition(".")
                # In this format, names that start with `__` describe the archive.
                if not dot or not stem or stem.startswith("__"):
                    continue
                content: bytes | BadRow | None = None
                if ending.lower() in used_endings:
                    content = member.read()
                    content = (
                        make_bad_row(f"its .{ending} is a link to no file of the archive")
                        if content is None
                        else content
                    )
                yield f"{directory}{slash}{stem}", ending.lower(), content


def _decode_sample(sample: _Sample) -> dict[str, object] | BadRow:
    fields: dict[str, object] = {}
    for ending, content in sample.items():
        if isinstance(content, BadRow):
            return content
        if content is None:
            fields[ending] = None
            continue
        try:
            text = content.decode("utf-8")
            fields[ending] = json.loads(text) if ending.rpartition(".")[2] == "json" else text
        except UnicodeDecodeError as error:
            return make_bad_row(f"invalid UTF-8 at byte {error.start} of its .{ending}")
        except (ValueError, RecursionError) as error:
            return make_bad_row(f"its .{ending} is not JSON: {error}")
    return fields
