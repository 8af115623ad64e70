"""The end of TensorBoard's event files, by which a writer knows what the one before it has left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TEXT = "/text_summary"
"""The end of the tags of texts."""


class LastStep:
    """The last step that a directory of event files shows, and what it shows of it.

    Steps of one file never decrease, but for what is logged at step 0, and the start of a session hides the events of
    its step and later ones in earlier files. So the end of each file tells enough, and long files are read fast.

    Attributes:
        step: 0 where nothing is shown.
        tags: of the scalars, histograms and texts of that step; None: all that the run has logged.
    """

    def __init__(self, directory: Path, event_class: Any, start: int):
        """Reads the files.

        Args:
            directory: of the files, whose names follow the time.
            event_class: the class `Event` of tensorboardX's protobufs.
            start: the status of a session's start.
        """
        self.step = 0
        self.tags: set[str] | None = set()
        for file in sorted(directory.glob("events*")):
            frames = [*_frames(file.read_bytes())]
            # Behind the version of the file.
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

    def has(self, name: str, step: int) -> bool:
        """True if the directory shows a line of the run, as far as its end tells."""
        return step < self.step or (step == self.step and (self.tags is None or name in self.tags))


def _frames(data: bytes) -> Iterator[bytes]:
    """The whole events of a file: each has its length (8 bytes) and a CRC (4) before it, and a CRC (4) behind it."""
    at = 0
    while at + 12 <= len(data):
        end = at + 12 + int.from_bytes(data[at : at + 8], "little")
        if end + 4 > len(data):
            return
        yield data[at + 12 : end]
        at = end + 4
