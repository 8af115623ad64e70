"""Reads the end of TensorBoard's event files, to find out what earlier writers left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TEXT = "/text_summary"
"""Suffix of the tags of texts."""


class LastStep:
    """The last step in a directory of event files, and its tags.

    Steps of a file never decrease, except for events at step 0, and the start of a session hides the events of its step
    and later ones in earlier files. So the end of each file is enough, and long files are read fast.

    Attributes:
        step: 0 for an empty directory.
        tags: scalars, histograms and texts of the step; None means everything the run has logged.
    """

    def __init__(self, directory: Path, event_class: Any, start: int):
        """Reads the files.

        Args:
            directory: directory of the files, whose names sort by time.
            event_class: the class `Event` of tensorboardX's protobufs.
            start: the status of a session's start.
        """
        self.step = 0
        self.tags: set[str] | None = set()
        for file in sorted(directory.glob("events*")):
            frames = [*_iter_events(file.read_bytes())]
            # The event after the file's version.
            for event in map(event_class.FromString, frames[1:2]):
                if event.session_log.status == start and event.step <= self.step:
                    self.step, self.tags = max(event.step - 1, 0), None
            self._read_end(frames, event_class)

    def _read_end(self, frames: list[bytes], event_class: Any) -> None:
        last, tags = 0, set[str]()
        for event in map(event_class.FromString, reversed(frames)):
            if event.session_log.status or not event.step:
                continue
            if event.step < last:
                break
            last = event.step
            tags |= {value.tag.removesuffix(_TEXT) for value in event.summary.value}
        if last > self.step:
            self.step, self.tags = last, tags
        elif last == self.step and self.tags is not None:
            self.tags |= tags

    def has_line(self, name: str, step: int) -> bool:
        """True if the directory shows a line of the run, according to the end of its files."""
        return step < self.step or (step == self.step and (self.tags is None or name in self.tags))


def _iter_events(data: bytes) -> Iterator[bytes]:
    """The complete events of a file: 8 bytes of length and 4 of CRC before each, and 4 of CRC after it."""
    offset = 0
    while offset + 12 <= len(data):
        end = offset + 12 + int.from_bytes(data[offset : offset + 8], "little")
        if end + 4 > len(data):
            return
        yield data[offset + 12 : end]
        offset = end + 4
