"""Keeps a copy of a run directory in the bucket with its checkpoints, so that the run can resume on another machine."""

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
from lm_trainer.core.bucket_files import download_objects
from lm_trainer.core.errors import MachineError
from lm_trainer.core.files import write_atomically
from lm_trainer.health.signals import SAVE_NOW, STOP_AFTER_SAVE
from lm_trainer.run.files.records import COPY_DIRECTORY

logger = logging.getLogger(__name__)

_ORIGIN = ".copy"
_LOCAL_FILES = (".lock", SAVE_NOW, STOP_AFTER_SAVE)
"""Files that are not copied. A copied request would be executed a second time on the machine that fetches the copy."""
_PUSH_INTERVAL = 20.0
"""Minimum number of seconds between two copies of changed files."""
_LAST_SECONDS = 10.0
"""Time limit per file for the copy at the end of the run, in seconds."""
_MAX_TIME_SHARE = 0.1
"""Maximum fraction of time spent copying. Large metrics files are therefore copied less often."""
_MAX_FILE_BYTES = 64 << 20
"""Maximum size of a file to copy, in bytes. Metrics files are copied regardless of their size."""


class BucketMirror:
    """Context manager that mirrors the run directory to `BASE/ID/run` in a bucket, in the process that writes the run.

    The file `.copy` contains an identifier of the local directory that was copied, and exists in both directories. If
    the identifiers differ, the copy comes from another machine and is newer, so it replaces the local directory.

    Args:
        path: the run directory.
        checkpoints: the checkpoint directory of the run.
    """

    def __init__(self, path: Path, checkpoints: Bucket):
        self._path, self._to = path, checkpoints / COPY_DIRECTORY
        self._copied: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._push_periodically, name="run copy", daemon=True)
        self._warned = False

    def is_newer(self) -> bool:
        """Returns True if the copy comes from the directory of another machine."""
        recorded = read_json(self._to, _ORIGIN).get("origin")
        return recorded is not None and recorded != self._read_origin()

    def read(self, name: str) -> bytes | None:
        """Reads a file of the run, from the copy if the copy is newer; None if there is no such file."""
        if self.is_newer():
            return self._to.read(name)
        file = self._path / name
        return file.read_bytes() if file.is_file() else None

    def fetch(self) -> bool:
        """Replaces the files in the run directory with the copy if the copy is newer. Returns True if it was."""
        if not self.is_newer():
            return False
        download_objects(self._to, [name for name in self._to.list() if name != _ORIGIN], self._path)
        return True

    def __enter__(self) -> Self:
        if self._read_origin() is None or self.is_newer():
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
        """Copies changed files to the bucket.

        Args:
            seconds: time limit per file.

        Raises:
            MachineError: if the bucket cannot be written.
        """
        with self._lock:
            changed = {
                name: state for name, state in _file_states(self._path).items() if self._copied.get(name) != state
            }
            # The origin is written last, so that an interrupted copy does not count as newer.
            for name in sorted(changed, key=lambda name: name == _ORIGIN):
                self._to.write(name, _read_complete_lines(self._path / name), seconds=seconds)
                self._copied[name] = changed[name]

    def _push_periodically(self) -> None:
        pause = _PUSH_INTERVAL
        while not self._stop.wait(pause):
            started = time.monotonic()
            try:
                self.push()
                self._warned = False
            except (MachineError, OSError) as error:
                if not self._warned:
                    logger.warning("%s; the copy of the run directory is tried again", error)
                self._warned = True
            pause = max(_PUSH_INTERVAL, (time.monotonic() - started) / _MAX_TIME_SHARE)

    def _read_origin(self) -> str | None:
        file = self._path / _ORIGIN
        if not file.is_file():
            return None
        try:
            return json.loads(file.read_text())["origin"]
        except (ValueError, KeyError, TypeError):
            raise MachineError(f"{file} is damaged; remove the file, and the copy in {self._to} counts") from None


def _file_states(directory: Path) -> dict[str, tuple[int, int]]:
    """Returns a mapping from relative path to (size in bytes, modification time in ns) for every file to copy."""
    states = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            if name in _LOCAL_FILES or name.endswith(".tmp"):
                continue
            path = Path(folder) / name
            try:
                state = path.stat()
            # The file may have been deleted in the meantime.
            except FileNotFoundError:
                continue
            if state.st_size <= _MAX_FILE_BYTES or path.suffix == ".jsonl":
                states[str(path.relative_to(directory))] = (state.st_size, state.st_mtime_ns)
    return states


def _read_complete_lines(file: Path) -> bytes:
    content = file.read_bytes()
    # An incomplete line is left for the next copy.
    return content[: content.rfind(b"\n") + 1] if file.suffix == ".jsonl" else content
