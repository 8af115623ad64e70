"""Audio files, each with a text file of the same name, in folders or tar archives."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.base import BadRow, FileSource, Row, Shard
from lm_trainer.data.sources.compression import file_suffix
from lm_trainer.data.sources.files import File, find_file_system, group_files, look_up_file, open_binary
from lm_trainer.data.sources.tar import open_tar

RECORDINGS = (".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".aiff", ".aif")
_ARCHIVE = ".tar"


class AudioFiles(FileSource):
    """Recordings whose texts are in `.txt` files of the same name, or tar archives of both.

    For use with `data.format: {type: audio}`. For a list of recordings, use `jsonl`.
    """

    type: Literal["audio_files"] = "audio_files"

    suffixes: ClassVar[tuple[str, ...]] = (*RECORDINGS, _ARCHIVE)
    reads_archives: ClassVar[bool] = True

    def shards_of_files(self, files: Sequence[File], text_key: str, fields: tuple[str, ...]) -> list[Shard]:
        del text_key
        if len(fields) != 2:
            format_problem = "reads text alone" if not fields else f"reads the fields {', '.join(fields)}"
            raise UserError(
                f"{files[0].name} is a recording or an archive of some, which has a text and nothing else, but "
                f"data.format {format_problem}; write format: {{type: audio}}, or list the recordings in a .jsonl file"
            )
        loose = [file for file in files if file_suffix(file.url) != _ARCHIVE]
        _refuse_shared_texts(loose)
        archives = [file for file in files if file_suffix(file.url) == _ARCHIVE]
        shards: list[Shard] = [ArchiveShard(file, fields) for file in archives]
        pairs = [tuple(_RecordingWithText(file, _find_text_file(file)) for file in run) for run in group_files(loose)]
        return [*shards, *(RecordingShard(run, fields) for run in pairs)]


class _RecordingWithText(NamedTuple):
    recording: File
    text: File | None


@dataclass(frozen=True)
class RecordingShard:
    """One or more recordings, in order. Each row is a recording."""

    pairs: tuple[_RecordingWithText, ...]
    fields: tuple[str, ...]

    @property
    def files(self) -> tuple[File, ...]:
        """All files of the shard, none of which may change while the shard is read."""
        return tuple(file for pair in self.pairs for file in (pair.text, pair.recording) if file is not None)

    @property
    def size(self) -> int:
        return sum(pair.recording.size for pair in self.pairs)

    @property
    def text_size(self) -> None:
        return None

    def identity(self) -> dict[str, object]:
        return {"type": "audio_files", "fields": list(self.fields), "files": [file.identity() for file in self.files]}

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        for number, pair in enumerate(self.pairs[start:], start):
            location = pair.recording.name
            if pair.text is None:
                yield BadRow(number, location, f"there is no text beside it, {os.path.splitext(location)[0]}.txt")
                continue
            contents = []
            for file in (pair.recording, pair.text):
                with open_binary(file) as stream:
                    contents.append(stream.read())
            yield _make_row(number, location, contents[0], contents[1], self.fields)


@dataclass(frozen=True)
class ArchiveShard:
    """A tar archive of recordings, each next to its text. Each row is a recording."""

    file: File
    fields: tuple[str, ...]

    @property
    def files(self) -> tuple[File, ...]:
        return (self.file,)

    @property
    def size(self) -> int:
        return self.file.size

    @property
    def text_size(self) -> None:
        return None

    def identity(self) -> dict[str, object]:
        return {"type": "audio_archive", "fields": list(self.fields), "files": [self.file.identity()]}

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        for number, (name, recording, text) in enumerate(self._iter_samples()):
            location = f"{self.file.name}:{name}"
            if number < start:
                continue
            if isinstance(recording, str):
                yield BadRow(number, location, recording)
            elif recording is None or text is None:
                missing_lines = "recording" if recording is None else "text"
                yield BadRow(number, location, f"there is no {missing_lines} of this name beside it in the archive")
            else:
                yield _make_row(number, location, recording, text, self.fields)

    def _iter_samples(self) -> Iterator[tuple[str, bytes | str | None, bytes | None]]:
        """Yields (name without ending, recording, text) for consecutive files with the same name.

        If a name has several recordings, an error message is yielded instead of the recording.
        """
        name, contents, endings = None, dict[bool, bytes](), list[str]()

        def take_sample() -> tuple[bytes | str | None, bytes | None]:
            several = f"there are several recordings of this name, {', '.join(endings)}; which has the text?"
            return (several if len(endings) > 1 else contents.get(True)), contents.get(False)

        with open_tar(self.file) as archive:
            for member in archive:
                stem, ending = os.path.splitext(member.name)
                if ending.lower() not in (*RECORDINGS, ".txt"):
                    continue
                if name is not None and stem != name:
                    yield name, *take_sample()
                    contents, endings = {}, []
                name = stem
                # A link without a target in the archive counts as a missing file.
                if (content := member.read()) is not None:
                    contents[ending.lower() != ".txt"] = content
                    endings += [ending] if ending.lower() != ".txt" else []
        if name is not None:
            yield name, *take_sample()


def _refuse_shared_texts(recordings: Sequence[File]) -> None:
    """Raises `UserError` if two recordings have the same text file."""
    recording_by_stem: dict[str, File] = {}
    for recording in recordings:
        stem = os.path.splitext(recording.name)[0]
        if (other := recording_by_stem.setdefault(stem, recording)) is not recording:
            raise UserError(
                f"{other.name} and {recording.name} have one name, so one text, {stem}.txt; list one of them alone, or "
                "rename one and give it a text of its own"
            )


def _make_row(number: int, location: str, recording: bytes, text: bytes, fields: tuple[str, ...]) -> Row | BadRow:
    try:
        words = text.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        return BadRow(number, location, f"its text is not UTF-8 at byte {error.start}")
    return Row(number, location, "", record={fields[0]: recording, fields[1]: words})


def _find_text_file(recording: File) -> File | None:
    """Returns the text file of a recording; None if it is missing."""
    url = f"{os.path.splitext(recording.url)[0]}.txt"
    try:
        filesystem, path = find_file_system(url, local=recording.local)
        return look_up_file(filesystem, path, url)
    except OSError:
        return None
