"""WebDataset: tar archives in which files of one name and several endings are one sample."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from lm_trainer.data.sources.base import BadRow, FileShard, FileSource, Row, Shard, bad, read_record
from lm_trainer.data.sources.files import File, group, numbered
from lm_trainer.data.sources.tar import open_tar


class WebDataset(FileSource):
    """Tar archives of samples: `0001.txt`, `0001.json`, ...; a sample is a record whose fields are the endings.

    `data.text_key` is `txt`, or `json.caption` for a field of the JSON file. Other files, such as images, are passed
    over.
    """

    type: Literal["webdataset"] = "webdataset"

    # It has to be named: by themselves, archives are recordings.
    reads_archives: ClassVar[bool] = True

    def shards_of_files(self, files: Sequence[File], text_key: str, fields: tuple[str, ...]) -> list[Shard]:
        return [WebDatasetShard(run, text_key, fields) for run in group(files)]


class WebDatasetShard(FileShard):
    """Some archives, in order; a row is a sample."""

    def form(self) -> dict[str, Any]:
        return {"type": "webdataset"}

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        files = (self._samples(file) for file in self.files)
        for number, (where, sample) in numbered(files, start):
            row = sample if isinstance(sample, BadRow) else read_record(sample, self.text_key, self.fields)
            yield row._replace(number=number, where=where)

    def _samples(self, file: File) -> Iterator[tuple[str, dict[str, Any] | BadRow]]:
        """Yields (archive and key, fields by ending) for each run of files of one name."""
        key, sample = None, {}
        for name, ending, content in self._members(file):
            if key is not None and name != key:
                yield f"{file.name}:{key}", _decoded(sample)
                sample = {}
            key = name
            sample[ending] = bad(f"two files end in .{ending}") if ending in sample else content
        if key is not None:
            yield f"{file.name}:{key}", _decoded(sample)

    def _members(self, file: File) -> Iterator[tuple[str, str, bytes | BadRow | None]]:
        """Yields (key, ending, content) for each file or link; the content of what is not asked for is None."""
        wanted = {part for name in self.wanted for part in (name, name.partition(".")[0])}
        with open_tar(file) as archive:
            for member in archive:
                directory, slash, name = member.name.rpartition("/")
                stem, dot, ending = name.partition(".")
                # As the format has it: what begins so describes the archive.
                if not dot or not stem or stem.startswith("__"):
                    continue
                content: bytes | BadRow | None = None
                if ending.lower() in wanted:
                    content = member.read()
                    content = bad(f"its .{ending} is a link to no file of the archive") if content is None else content
                yield f"{directory}{slash}{stem}", ending.lower(), content


def _decoded(sample: dict[str, Any]) -> dict[str, Any] | BadRow:
    found: dict[str, Any] = {}
    for ending, content in sample.items():
        if isinstance(content, BadRow):
            return content
        if content is None:
            found[ending] = None
            continue
        try:
            text = content.decode("utf-8")
            found[ending] = json.loads(text) if ending.rpartition(".")[2] == "json" else text
        except UnicodeDecodeError as error:
            return bad(f"invalid UTF-8 at byte {error.start} of its .{ending}")
        except (ValueError, RecursionError) as error:
            return bad(f"its .{ending} is not JSON: {error}")
    return found
