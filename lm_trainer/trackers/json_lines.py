"""Files with one JSON object per line, each of which belongs to a step of a run."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_trainer.core.errors import MachineError
from lm_trainer.core.files import write_atomically
from lm_trainer.trackers.series import Plain, Series, line_name

logger = logging.getLogger(__name__)

METRICS, TEXTS, HISTOGRAMS = "metrics.jsonl", "texts.jsonl", "histograms.jsonl"
_BLOCK_BYTES = 4 << 20
"""Number of bytes of a long file that are parsed at a time."""
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonLines:
    """A file with one JSON object per line, to which lines are appended one at a time.

    Args:
        path: path of the file, which does not need to exist.
        resume_step: number of completed steps. Lines of later steps are dropped, because they are logged a second time.
            With 0, an existing file is renamed.
        expected: lines that the file is expected to contain.

    Attributes:
        missing: steps of the missing lines, by name of the line.
        initial_lines: lines that the file contained when it was opened.

    Raises:
        MachineError: in the constructor and in every method, if the file cannot be written or was removed.
    """

    def __init__(self, path: Path, resume_step: int, expected: Plain | None = None):
        self.path = path
        try:
            existing = _drop_steps_after(path, resume_step)
            self._fd = _open_to_append(path)
        except OSError as error:
            raise unwritable_error(path, error) from error
        self._size = os.fstat(self._fd).st_size
        required = Series(expected)
        self.missing = required.missing_in(existing)
        self.initial_lines = existing.to_plain()
        # Missing lines stay recorded as missing, however often the run resumes.
        self._series = required.union(existing) if self.missing else existing

    @property
    def series(self) -> Plain:
        """All lines that the file should contain, to be passed as `expected` at the next start."""
        return self._series.to_plain()

    def write(self, record: Mapping[str, Any]) -> None:
        # Each line is one unbuffered write, so a kill between two steps loses no line, and a kill during a write tears
        # none.
        line = _encode_line(record)
        try:
            written = os.write(self._fd, line)
            while written < len(line):
                written += os.write(self._fd, line[written:])
            links = os.fstat(self._fd).st_nlink
        except OSError as error:
            # If the disk is full, a part of the line may have been written, which would corrupt the next line.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise unwritable_error(self.path, error) from error
        if not links:
            raise self._removed_error()
        self._size += len(line)
        self._series.add(line_name(record), record["step"])

    def read_records(self) -> list[dict[str, Any]]:
        """Reads the records in the file. Non-finite floats remain strings."""
        try:
            return [record for record, _ in parse_records(self.path.read_bytes())[0]]
        except OSError as error:
            raise unwritable_error(self.path, error) from error

    def insert(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Inserts records of earlier steps between the existing lines, ordered by step and time."""
        ordered = sorted([*self.read_records(), *records], key=lambda record: (record["step"], record.get("time", 0.0)))
        try:
            write_atomically(self.path, b"".join(_encode_line(record) for record in ordered))
            os.close(self._fd)
            self._fd = _open_to_append(self.path)
            self._size = os.fstat(self._fd).st_size
        except OSError as error:
            raise unwritable_error(self.path, error) from error

    def sync(self) -> None:
        """Flushes all lines to disk, so that they survive a power cut."""
        try:
            os.fsync(self._fd)
            opened = os.fstat(self._fd)
            current = self.path.stat()
            _sync_directory(self.path.parent)
        except FileNotFoundError:
            raise self._removed_error() from None
        except OSError as error:
            raise unwritable_error(self.path, error) from error
        if not os.path.samestat(opened, current):
            raise self._removed_error()

    def close(self) -> None:
        if self._fd < 0:
            return
        # Closing the file twice must be safe, because this happens if another tracker cannot be opened.
        fd, self._fd = self._fd, -1
        try:
            os.fsync(fd)
        except OSError as error:
            raise unwritable_error(self.path, error) from error
        finally:
            os.close(fd)

    def _removed_error(self) -> MachineError:
        return MachineError(
            f"{self.path} was removed or replaced while the run wrote it: what it has logged is lost. Put it back if "
            f"you can, then start the same command again: the run goes on from its newest checkpoint, and names the "
            f"lines that are missing"
        )


def decode_non_finite(value: Any) -> Any:
    """Converts a value in these files back to the logged value.

    Strings that represent non-finite floats become floats.
    """
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def parse_records(content: bytes) -> tuple[list[tuple[dict[str, Any], bytes]], int]:
    """Returns the records with their lines, and the number of invalid lines, which include an incomplete last line."""
    records, broken = [], 0
    for line in content.splitlines(keepends=True):
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append((record, line))
        else:
            broken += 1
    return records, broken


def read_record_blocks(file: Path) -> Iterator[list[dict[str, Any]]]:
    """Yields the records of a file in order, some megabytes of the file at a time. Skips lines that are not whole.

    Non-finite floats remain strings. The file may be read while it is written, and does not need to exist.
    """
    if not file.is_file():
        return
    loads = _fast_loads()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            # Completes the last line.
            yield _parse_block(block + stream.readline(), loads)


def _parse_block(block: bytes, loads: Callable[[bytes], Any]) -> list[dict[str, Any]]:
    # All lines at once take half the time of one after the other. JSON has no line breaks inside of texts.
    if block.endswith(b"\n"):
        try:
            records = loads(b"[" + block[:-1].replace(b"\n", b",") + b"]")
            if all(type(record) is dict and type(record.get("step")) is int for record in records):
                return records
        except ValueError:
            pass
    # A line is damaged.
    return [record for record, _ in parse_records(block)[0]]


def _fast_loads() -> Callable[[bytes], Any]:
    """Returns orjson's parser if it is installed, which takes a sixth of the time, otherwise Python's."""
    try:
        import orjson
    except ImportError:
        return json.loads
    return orjson.loads


def unwritable_error(path: Path, error: OSError) -> MachineError:
    """Returns the error for a file that cannot be written."""
    return MachineError(
        f"{path}: cannot be written ({error.strerror or error}); make room or mend the directory, then start the same "
        f"command again: the run goes on from its newest checkpoint"
    )


def _encode_line(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, allow_nan=False) + "\n").encode()


def _open_to_append(path: Path) -> int:
    # With O_APPEND, lines go to the end of the file even if another process has the file open.
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _drop_steps_after(path: Path, step: int) -> Series:
    """Keeps the complete lines of steps up to and including `step`, and returns their series.

    Replaces the file atomically.

    If the run starts at step 0, the file is renamed and kept: the checkpoints were lost or moved, so the steps may
    never be logged a second time.
    """
    series = Series()
    if not path.exists():
        return series
    content = path.read_bytes()
    records, broken = parse_records(content)
    if broken:
        logger.warning("%s: dropped %d lines that were not whole", path, broken)
    if records and not step:
        path.rename(renamed := _find_unused_path(path))
        last = max(record["step"] for record, _ in records)
        # Warns only once for all files of a run.
        level = logging.WARNING if path.name == METRICS else logging.INFO
        logger.log(level, "%s reached step %d, but no checkpoint was found: kept as %s", path, last, renamed.name)
        return series
    retained = [(record, line) for record, line in records if record["step"] <= step]
    if len(retained) < len(records):
        logger.info(
            "%s: dropped %d lines of steps after %d, which come again", path, len(records) - len(retained), step
        )
    text = b"".join(line for _, line in retained)
    if text != content:
        write_atomically(path, text)
    for record, _ in retained:
        series.add(line_name(record), record["step"])
    return series


def _find_unused_path(path: Path) -> Path:
    """Returns the first path among `metrics-1.jsonl`, `metrics-2.jsonl`, ... that does not exist."""
    names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def _sync_directory(directory: Path) -> None:
    """Flushes the entries of a directory to disk, so that they survive a power cut, if the file system supports it."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)
