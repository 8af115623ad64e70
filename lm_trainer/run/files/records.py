"""Records of a run, run.json and env.json: written whole or not at all, and twice, of which a copy is beside the
checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_trainer.core.bucket import StoragePath
from lm_trainer.core.errors import MachineError
from lm_trainer.core.files import write_atomically
from lm_trainer.run.config.earlier_runs import with_implied_keys
from lm_trainer.run.files.bucket_mirror import COPY

RUN, ENVIRONMENT = "run.json", "env.json"


def read_run_record(run_dir: Path) -> dict[str, Any]:
    """Reads run.json: `id`, `checkpoints`, `identity`, and `changes` if the configuration has changed.

    Raises:
        MachineError: when it is missing or damaged.
    """
    return parsed_run(run_dir / RUN, _content(run_dir / RUN))


def read_attempts(run_dir: Path) -> list[dict[str, Any]]:
    """Reads env.json, an entry for each attempt; empty where there is none.

    Raises:
        MachineError: when it is damaged.
    """
    file = run_dir / ENVIRONMENT
    return parsed_attempts(file, _content(file) if file.exists() else None)


def parsed_run(file: Any, content: bytes) -> dict[str, Any]:
    """The content of run.json; raises `MachineError` when it is damaged."""
    found = _parsed(file, content)
    if not isinstance(found, dict):
        raise _damaged(file, "it holds no JSON object")
    return found


def recorded_checkpoints(run: Mapping[str, Any], run_dir: Path) -> str:
    """The directory of the checkpoints as run.json has it; raises `MachineError` where it lacks it."""
    found = run.get("checkpoints")
    if not isinstance(found, str):
        raise _damaged(run_dir / RUN, "it does not say where the checkpoints are")
    return found


def identity_of(run: Mapping[str, Any], run_dir: Path) -> dict[str, Any]:
    """The part of the configuration that decides numbers, with keys that are newer than the run as that meant them.

    Raises:
        MachineError: where run.json lacks it.
    """
    found = run.get("identity")
    if not isinstance(found, dict):
        raise _damaged(run_dir / RUN, "it does not say which configuration the run has")
    return with_implied_keys(found)


def parsed_attempts(file: Any, content: bytes | None) -> list[dict[str, Any]]:
    """The content of env.json, empty for None; raises `MachineError` when it is damaged."""
    found = [] if content is None else _parsed(file, content)
    if not isinstance(found, list) or not all(isinstance(x, dict) and isinstance(x.get("step"), int) for x in found):
        raise _damaged(file, "it holds no list of attempts")
    return found


def identity_beside(checkpoints: StoragePath) -> dict[str, Any] | None:
    """The part of the configuration that decides numbers, by the copy of run.json beside the checkpoints.

    None where there is no such copy, or only a damaged one.
    """
    try:
        content = _copied(checkpoints / COPY, RUN)
        identity = None if content is None else parsed_run(checkpoints / COPY / RUN, content).get("identity")
    except MachineError:
        return None
    return identity if isinstance(identity, dict) else None


def _copied(directory: StoragePath, name: str) -> bytes | None:
    if not isinstance(directory, Path):
        return directory.read(name)
    file = directory / name
    return _content(file) if file.is_file() else None


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise MachineError(f"{file}: cannot be read ({error.strerror or error})") from error


def _parsed(file: Any, content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise _damaged(file, f"it is not JSON: {error}" if content.strip() else "it is empty") from None


def _damaged(file: Any, why: str) -> MachineError:
    return MachineError(
        f"{file} is damaged: {why}. Put back a copy, or remove the file and start the run again: it then takes the "
        f"copy beside its checkpoints, in the directory {COPY}, or says what it cannot know without one"
    )


class RecordCopies:
    """The copies of a run's records beside its checkpoints.

    In a bucket they are those of `BucketMirror`, which keeps them up to date.

    Args:
        path: the run directory.
        checkpoints: the directory of its checkpoints.
        run_id: of the run; copies of another one count for nothing.
    """

    def __init__(self, path: Path, checkpoints: StoragePath, run_id: str):
        self._path, self._to, self._run_id = path, checkpoints / COPY, run_id

    def write(self, name: str, text: str) -> None:
        """Writes a record into the run directory, and its copy where that is on this machine."""
        write_atomically(self._path / name, text)
        if isinstance(self._to, Path):
            self._to.mkdir(exist_ok=True)
            write_atomically(self._to / name, text)

    def read(self, name: str) -> bytes | None:
        """The copy of a record; None where there is none.

        Raises:
            MachineError: when the copies are damaged.
        """
        run = _copied(self._to, RUN)
        if run is None or parsed_run(self._to / RUN, run).get("id") != self._run_id:
            return None
        return run if name == RUN else _copied(self._to, name)

    def restore(self) -> Sequence[str]:
        """Takes copies in the place of missing records, and returns their names; raises as `read`."""
        restored = []
        for name in (RUN, ENVIRONMENT):
            if not (self._path / name).exists() and (copy := self.read(name)) is not None:
                write_atomically(self._path / name, copy)
                restored.append(name)
        return restored
