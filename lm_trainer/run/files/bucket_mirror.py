"""Copy of a run directory in the bucket of its checkpoints, from which the run goes on on another machine."""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from pathlib import Path
from typing import Self

from lm_trainer.core.bucket import Bucket, read_json
from lm_trainer.core.bucket_files import fetch
from lm_trainer.core.errors import MachineError
from lm_trainer.core.files import write_atomically
from lm_trainer.health.signals import SAVE_NOW, STOP_AFTER_SAVE

logger = logging.getLogger(__name__)

COPY = "run"
"""The directory of the copy, beside the checkpoints of the run."""
_ORIGIN = ".copy"
_OF_THIS_MACHINE = (".lock", SAVE_NOW, STOP_AFTER_SAVE)
"""Files that are not copied: a request would be heeded again wherever the copy is fetched."""
_EVERY = 20.0
"""Seconds between two copies of what has changed."""
_LAST_SECONDS = 10.0
"""Time that each file may take when the run ends."""
_SHARE = 0.1
"""The most of the time that copying may take: a file of metrics that has grown large is copied less often."""
_LARGEST = 64 << 20
"""Bytes of a file that is copied; metrics are, however large."""


class BucketMirror:
    """Keeps `BASE/ID/run` in a bucket as the run directory is; a context manager, for the process that writes the run.

    The file `.copy` in both says of which machine's directory the copy is: a directory that finds another there is
    older than the copy, and is replaced by it.

    Args:
        path: the run directory.
        checkpoints: the directory of the run's checkpoints.
    """

    def __init__(self, path: Path, checkpoints: Bucket):
        self._path, self._to = path, checkpoints / COPY
        self._known: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_up, name="run copy", daemon=True)
        self._warned = False

    def is_newer(self) -> bool:
        """Returns True if the copy is of another machine's directory."""
        there = read_json(self._to, _ORIGIN).get("origin")
        return there is not None and there != self._origin()

    def read(self, name: str) -> bytes | None:
        """Reads a file of the run, from the copy where that is newer."""
        if self.is_newer():
            return self._to.read(name)
        file = self._path / name
        return file.read_bytes() if file.is_file() else None

    def fetch(self) -> bool:
        """Replaces the files of the run directory by those of the copy, if that is newer; returns whether it was."""
        if not self.is_newer():
            return False
        fetch(self._to, [name for name in self._to.list() if name != _ORIGIN], self._path)
        return True

    def __enter__(self) -> Self:
        if self._origin() is None or self.is_newer():
            write_atomically(self._path / _ORIGIN, json.dumps({"origin": secrets.token_hex(8)}))
        self.push()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        try:
            self.push(_LAST_SECONDS)
        except MachineError as error:
            logger.warning("%s; the metrics of the last steps are in %s alone", error, self._path)

    def push(self, seconds: float = 60.0) -> None:
        """Copies what has changed.

        Args:
            seconds: that each file may take.

        Raises:
            MachineError: when the bucket cannot be written.
        """
        with self._lock:
            changed = {name: state for name, state in _states(self._path).items() if self._known.get(name) != state}
            # Whose copy it is comes last: a copy that was broken off is then still taken for the older one.
            for name in sorted(changed, key=lambda name: name == _ORIGIN):
                self._to.write(name, _content(self._path / name), seconds=seconds)
                self._known[name] = changed[name]

    def _keep_up(self) -> None:
        pause = _EVERY
        while not self._stop.wait(pause):
            started = time.monotonic()
            try:
                self.push()
                self._warned = False
            except (MachineError, OSError) as error:
                if not self._warned:
                    logger.warning("%s; the copy of the run directory is tried again", error)
                self._warned = True
            pause = max(_EVERY, (time.monotonic() - started) / _SHARE)

    def _origin(self) -> str | None:
        file = self._path / _ORIGIN
        if not file.is_file():
            return None
        try:
            return json.loads(file.read_text())["origin"]
        except (ValueError, KeyError, TypeError):
            raise MachineError(f"{file} is damaged; remove the file, and the copy in {self._to} counts") from None


def _states(directory: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file that is copied, by its path in the directory."""
    found = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            if name in _OF_THIS_MACHINE or name.endswith(".tmp"):
                continue
            path = Path(folder) / name
            try:
                state = path.stat()
            # A file may go while it is looked for.
            except FileNotFoundError:
                continue
            if state.st_size <= _LARGEST or path.suffix == ".jsonl":
                found[str(path.relative_to(directory))] = (state.st_size, state.st_mtime_ns)
    return found


def _content(file: Path) -> bytes:
    content = file.read_bytes()
    # A line that is being written is left for the next time.
    return content[: content.rfind(b"\n") + 1] if file.suffix == ".jsonl" else content
