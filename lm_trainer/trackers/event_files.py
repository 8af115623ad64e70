"""Reads the end of TensorBoard event files, to find out how far earlier attempts have logged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TEXT = "/text_summary"
"""Suffix of the tags of text events."""


class LastStep:
    """The last step in a directory of event files, and the tags logged at this step.

    In a file, steps never decrease, except for events at step 0. A session start event hides all events in earlier
    files from its step on. It is therefore enough to parse the events at the end of each file, so long files are read
    fast.

    Attributes:
        step: the last step; 0 for an empty directory.
        tags: tags of the scalars, histograms and texts at this step; None means everything that the run has logged.
    """

    def __init__(self, directory: Path, event_class: Any, start: int):
        """Reads the files.

        Args:
            directory: directory of the files. Sorting them by name must sort them by time.
            event_class: the class `Event` of the protobufs in tensorboardX.
            start: the status that marks the start of a session.
        """
        self.step = 0
        self.tags: set[str] | None = set()
        for file in sorted(directory.glob("events*")):
            frames = [*_iter_events(file.read_bytes())]
            # The second event; the first one contains the version of the file format.
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
        """Returns True if the files contain a line of the run, judging by the events at their end."""
        return step < self.step or (step == self.step and (self.tags is None or name in self.tags))


def _iter_events(data: bytes) -> Iterator[bytes]:
    """Yields the complete events in a file.

    Each one follows its length (8 bytes) and a CRC (4 bytes), and ends with a CRC.
    """
    offset = 0
    while offset + 12 <= len(data):
        end = offset + 12 + int.from_bytes(data[offset : offset + 8], "little")
        if end + 4 > len(data):
            return
        yield data[offset + 12 : end]
        offset = end + 4
