"""Records of a run (run.json and env.json), which are written atomically and have a copy next to the checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_trainer.core.bucket import StoragePath
from lm_trainer.core.errors import MachineError
from lm_trainer.core.files import write_atomically
from lm_trainer.run.config.recorded_keys import with_inferred_keys

RUN, ENVIRONMENT = "run.json", "env.json"
COPY_DIRECTORY = "run"
"""Name of the directory with a copy of a run's files, next to its checkpoints."""


def read_run_record(run_dir: Path) -> dict[str, Any]:
    """Reads run.json, with the keys `id`, `checkpoints`, `identity`, and `changes` if the configuration has changed.

    Raises:
        MachineError: if the file is missing or damaged.
    """
    return parse_run_record(run_dir / RUN, _read_content(run_dir / RUN))


def read_attempts(run_dir: Path) -> list[dict[str, Any]]:
    """Reads env.json, which contains one entry per attempt. Returns an empty list if the file is missing.

    Raises:
        MachineError: if the file is damaged.
    """
    file = run_dir / ENVIRONMENT
    return parse_attempts(file, _read_content(file) if file.exists() else None)


def parse_run_record(file: object, content: bytes) -> dict[str, Any]:
    """Parses the content of run.json. Raises `MachineError` if it is damaged."""
    record = _parse_json(file, content)
    if not isinstance(record, dict):
        raise _damaged_record_error(file, "it holds no JSON object")
    return record


def recorded_checkpoint_directory(run: Mapping[str, Any], run_dir: Path) -> str:
    """Returns the checkpoint directory recorded in run.json. Raises `MachineError` if run.json does not contain it."""
    path = run.get("checkpoints")
    if not isinstance(path, str):
        raise _damaged_record_error(run_dir / RUN, "it does not say where the checkpoints are")
    return path


def recorded_identity(run: Mapping[str, Any], run_dir: Path) -> dict[str, Any]:
    """Returns the numeric identity recorded in run.json.

    Configuration keys that are newer than the run are added with the values that the run implicitly had.

    Raises:
        MachineError: if run.json does not contain the identity.
    """
    identity = run.get("identity")
    if not isinstance(identity, dict):
        raise _damaged_record_error(run_dir / RUN, "it does not say which configuration the run has")
    return with_inferred_keys(identity)


def parse_attempts(file: object, content: bytes | None) -> list[dict[str, Any]]:
    """Parses the content of env.json. Returns an empty list for None, and raises `MachineError` if it is damaged."""
    entries = [] if content is None else _parse_json(file, content)
    if not isinstance(entries, list) or not all(map(_is_attempt, entries)):
        raise _damaged_record_error(file, "it holds no list of attempts")
    return entries


def _is_attempt(entry: object) -> bool:
    """Returns True for an entry of env.json whose values have the types that readers rely on."""
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("step"), int)
        and isinstance(entry.get("packages", {}), dict)
        and isinstance(entry.get("devices", []), list)
    )


def read_identity_from_copy(checkpoints: StoragePath) -> dict[str, Any] | None:
    """Returns the numeric identity in the copy of run.json next to the checkpoints.

    Returns None if the copy is missing or damaged.
    """
    try:
        content = _read_copy(checkpoints / COPY_DIRECTORY, RUN)
        identity = (
            None if content is None else parse_run_record(checkpoints / COPY_DIRECTORY / RUN, content).get("identity")
        )
    except MachineError:
        return None
    return identity if isinstance(identity, dict) else None


def _read_copy(directory: StoragePath, name: str) -> bytes | None:
    if not isinstance(directory, Path):
        return directory.read(name)
    file = directory / name
    return _read_content(file) if file.is_file() else None


def _read_content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise MachineError(f"{file}: cannot be read ({error.strerror or error})") from error


def _parse_json(file: object, content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise _damaged_record_error(file, f"it is not JSON: {error}" if content.strip() else "it is empty") from None


def _damaged_record_error(file: object, reason: str) -> MachineError:
    return MachineError(
        f"{file} is damaged: {reason}. Put back a copy, or remove the file and start the run again: it then takes the "
        f"copy beside its checkpoints, in the directory {COPY_DIRECTORY}, or says what it cannot know without one"
    )


class RecordCopies:
    """Copies of a run's records next to its checkpoints.

    If the checkpoints are in a bucket, `BucketMirror` writes the copies.

    Args:
        path: the run directory.
        checkpoints: the directory of its checkpoints.
        run_id: ID of the run. Copies that belong to another run are ignored.
    """

    def __init__(self, path: Path, checkpoints: StoragePath, run_id: str):
        self._path, self._to, self._run_id = path, checkpoints / COPY_DIRECTORY, run_id

    def write(self, name: str, text: str) -> None:
        """Writes a record to the run directory, and its copy if the checkpoints are on this machine."""
        write_atomically(self._path / name, text)
        if isinstance(self._to, Path):
            self._to.mkdir(exist_ok=True)
            write_atomically(self._to / name, text)

    def read(self, name: str) -> bytes | None:
        """Reads the copy of a record; returns None if there is no copy.

        Raises:
            MachineError: if the copies are damaged.
        """
        run = _read_copy(self._to, RUN)
        if run is None or parse_run_record(self._to / RUN, run).get("id") != self._run_id:
            return None
        return run if name == RUN else _read_copy(self._to, name)

    def restore(self) -> Sequence[str]:
        """Restores missing records from their copies and returns their names. Raises the same errors as `read`."""
        restored = []
        for name in (RUN, ENVIRONMENT):
            if not (self._path / name).exists() and (copy := self.read(name)) is not None:
                write_atomically(self._path / name, copy)
                restored.append(name)
        return restored
