"""Files of one JSON object a line, which belong to the steps of a run."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_trainer.core.errors import MachineError
from lm_trainer.core.files import write_atomically
from lm_trainer.trackers.series import Plain, Series, line_name

logger = logging.getLogger(__name__)

METRICS, TEXTS, HISTOGRAMS = "metrics.jsonl", "texts.jsonl", "histograms.jsonl"
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonLines:
    """A file to which whole lines are appended.

    Args:
        path: the file, which need not exist.
        resume_step: lines of later steps are dropped, because they come again; 0: a file that is there gets another
            name.
        expected: the lines that the file must have.

    Attributes:
        missing: those that it lacks: steps by the name of the line.
        there: the lines that it had when it was opened.

    Raises:
        MachineError: here and in every method, when the file cannot be written, or is gone.
    """

    def __init__(self, path: Path, resume_step: int, expected: Plain | None = None):
        self.path = path
        try:
            there = _drop_steps_after(path, resume_step)
            self._fd = _open_to_append(path)
        except OSError as error:
            raise machine_error(path, error) from error
        self._size = os.fstat(self._fd).st_size
        must = Series(expected)
        self.missing = must.without(there)
        self.there = there.plain()
        # What is missing stays so, however often the run is resumed.
        self._series = must.joined(there) if self.missing else there

    @property
    def series(self) -> Plain:
        """The lines that the file has had, as `expected` takes them at the next start."""
        return self._series.plain()

    def write(self, record: Mapping[str, Any]) -> None:
        # One unbuffered write a line: a kill between two steps loses nothing, and a kill inside one tears no line.
        line = _line(record)
        try:
            written = os.write(self._fd, line)
            while written < len(line):
                written += os.write(self._fd, line[written:])
            links = os.fstat(self._fd).st_nlink
        except OSError as error:
            # A full disk may have taken half a line, which would spoil the next one.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise machine_error(self.path, error) from error
        if not links:
            raise self._gone()
        self._size += len(line)
        self._series.add(line_name(record), record["step"])

    def records(self) -> list[dict[str, Any]]:
        """Reads its records, with the floats that JSON lacks as texts."""
        try:
            return [record for record, _ in parse(self.path.read_bytes())[0]]
        except OSError as error:
            raise machine_error(self.path, error) from error

    def insert(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Puts records of earlier steps among the other lines, by step and time."""
        ordered = sorted([*self.records(), *records], key=lambda record: (record["step"], record.get("time", 0.0)))
        try:
            write_atomically(self.path, b"".join(_line(record) for record in ordered))
            os.close(self._fd)
            self._fd = _open_to_append(self.path)
            self._size = os.fstat(self._fd).st_size
        except OSError as error:
            raise machine_error(self.path, error) from error

    def sync(self) -> None:
        """Returns when all lines would outlast a power cut."""
        try:
            os.fsync(self._fd)
            ours = os.fstat(self._fd)
            named = self.path.stat()
            _sync_directory(self.path.parent)
        except FileNotFoundError:
            raise self._gone() from None
        except OSError as error:
            raise machine_error(self.path, error) from error
        if not os.path.samestat(ours, named):
            raise self._gone()

    def close(self) -> None:
        if self._fd < 0:
            return
        # Closing twice is harmless: it also happens when another tracker fails to open.
        fd, self._fd = self._fd, -1
        try:
            os.fsync(fd)
        except OSError as error:
            raise machine_error(self.path, error) from error
        finally:
            os.close(fd)

    def _gone(self) -> MachineError:
        return MachineError(
            f"{self.path} was removed or replaced while the run wrote it: what it has logged is lost. Put it back if "
            f"you can, then start the same command again: the run goes on from its newest checkpoint, and names the "
            f"lines that are missing"
        )


def decode(value: Any) -> Any:
    """Converts a value of these files to that which was logged: texts for the floats that JSON lacks become floats."""
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def parse(content: bytes) -> tuple[list[tuple[dict[str, Any], bytes]], int]:
    """Parses the records with their lines, and counts the lines that hold none, a torn last one included."""
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


def machine_error(path: Path, error: OSError) -> MachineError:
    """The error of a file that cannot be written."""
    return MachineError(
        f"{path}: cannot be written ({error.strerror or error}); make room or mend the directory, then start the same "
        f"command again: the run goes on from its newest checkpoint"
    )


def _line(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, allow_nan=False) + "\n").encode()


def _open_to_append(path: Path) -> int:
    # For appending, so that a line ends up at the end even if somebody else has the file open too.
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _drop_steps_after(path: Path, step: int) -> Series:
    """Keeps the whole lines of steps up to `step`, and returns them; the file changes by a rename or not at all.

    Where the run begins again at step 0 the file is kept under another name: its checkpoints were lost or moved, and
    nothing says that the steps will come again.
    """
    series = Series()
    if not path.exists():
        return series
    content = path.read_bytes()
    records, broken = parse(content)
    if broken:
        logger.warning("%s: dropped %d lines that were not whole", path, broken)
    if records and not step:
        path.rename(aside := _unused_name(path))
        last = max(record["step"] for record, _ in records)
        # Once for all files of a run.
        level = logging.WARNING if path.name == METRICS else logging.INFO
        logger.log(level, "%s reached step %d, but no checkpoint was found: kept as %s", path, last, aside.name)
        return series
    kept = [(record, line) for record, line in records if record["step"] <= step]
    if len(kept) < len(records):
        logger.info("%s: dropped %d lines of steps after %d, which come again", path, len(records) - len(kept), step)
    text = b"".join(line for _, line in kept)
    if text != content:
        write_atomically(path, text)
    for record, _ in kept:
        series.add(line_name(record), record["step"])
    return series


def _unused_name(path: Path) -> Path:
    """The first of `metrics-1.jsonl`, `metrics-2.jsonl`, ... that does not exist."""
    names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def _sync_directory(directory: Path) -> None:
    """Makes the names in a directory outlast a power cut, where the file system can."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)
