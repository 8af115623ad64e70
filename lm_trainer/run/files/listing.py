"""Lists the runs on disk with their status, which is determined only from their directories."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.file_lock import is_locked
from lm_trainer.run.files.branch import BranchPoint
from lm_trainer.run.files.find_run import locate_checkpoints, read_trainer_setting
from lm_trainer.run.files.records import RUN, read_run_record
from lm_trainer.trackers.jsonl import METRICS, SUMMARY

logger = logging.getLogger(__name__)

_TAIL_BYTES = 1 << 16
"""Number of bytes at the end of metrics.jsonl in which the last loss is searched."""


@dataclass(frozen=True)
class RunListing:
    """A run and its status."""

    id: str
    directory: Path
    state: Literal["running", "done", "stopped", "not begun", "damaged"]
    """`running`: a process holds the lock of the directory. `stopped`: the same command would resume the run.
    `damaged`: run.json cannot be read, and the log contains the reason."""
    step: int
    """Number of the last logged step; 0 if there is none."""
    steps: int | None
    """Configured total number of steps; None if the configuration cannot be read."""
    loss: float | None
    """Training loss of the last logged step, in nats per token."""
    changed: float
    """Time of the last change to the run's files, in seconds since 1970."""
    parent: str | None
    """ID of the run that this run is a branch of; None for other runs."""
    branched_at: int | None
    """Number of steps that a branch shares with its parent; None for other runs."""
    bytes: int
    """Total size of the run directory and of the local checkpoints."""


def list_runs(directories: Iterable[Path]) -> list[RunListing]:
    """Lists the runs in the given directories, the one that changed last first.

    Args:
        directories: run directories, or directories that contain run directories, such as `logs`.
    """
    paths = {path.resolve(): path for base in directories for path in _run_directories(base)}
    return sorted((_read_listing(path) for path in paths.values()), key=lambda run: -run.changed)


def _run_directories(base: Path) -> Iterator[Path]:
    if (base / "run.json").is_file():
        yield base
    else:
        yield from sorted(path.parent for path in base.glob("*/run.json"))


def _read_listing(path: Path) -> RunListing:
    step, loss = read_last_step_and_loss(path / METRICS)
    summary = _read_json(path / SUMMARY)
    record: Mapping[str, Any] = {}
    try:
        record = read_run_record(path)
        checkpoints = locate_checkpoints(record, path)
    except MachineError as error:
        # The error must not prevent the other runs from being listed.
        logger.warning("%s", error)
        checkpoints = None
    # Checkpoints in a bucket are not counted, because that would require requests.
    directories = [path, checkpoints] if isinstance(checkpoints, Path) else [path]
    files = [path / name for name in ("run.json", METRICS, SUMMARY)]
    sizes = {file: size for directory in directories for file, size in _file_sizes(directory)}
    steps = _read_total_steps(record, path)
    state: Any = "stopped" if step else "not begun"
    if is_locked(path / ".lock"):
        state = "running"
    elif checkpoints is None:
        state = "damaged"
    elif summary.get("step", -1) >= step or (steps is not None and step >= steps):
        state = "done"
    changed = max(file.stat().st_mtime for file in files if file.is_file())
    parent, branched_at = _read_branch(record, path)
    size = sum(sizes.values())
    return RunListing(
        path.name, path, state, max(step, branched_at or 0), steps, loss, changed, parent, branched_at, size
    )


def _read_branch(record: Mapping[str, Any], path: Path) -> tuple[str, int] | tuple[None, None]:
    try:
        branch = BranchPoint.from_record(record, path / RUN)
    except UserError:
        branch = None
    return (None, None) if branch is None else (branch.parent, branch.step)


def as_tree(runs: Sequence[RunListing]) -> list[tuple[int, RunListing]]:
    """Returns the runs with their depth: each branch comes after its parent, and is one level deeper.

    The order is kept otherwise. A branch whose parent is not among the runs is at the top level.
    """
    by_location = {(run.directory.resolve().parent, run.id): run for run in runs}
    children: dict[int, list[RunListing]] = {}
    for run in runs:
        parent = by_location.get((run.directory.resolve().parent, run.parent or ""))
        children.setdefault(0 if parent is None or parent is run else id(parent), []).append(run)

    def below(key: int, depth: int) -> Iterator[tuple[int, RunListing]]:
        for run in children.get(key, ()):
            yield depth, run
            yield from below(id(run), depth + 1)

    return [*below(0, 0)]


def read_last_step_and_loss(file: Path) -> tuple[int, float | None]:
    """Returns the last step in metrics.jsonl and its loss, or 0 and None if there are no steps."""
    for line in reversed(_read_last_lines(file)):
        # The first line may be truncated and the last one incomplete, and other lines may not contain a loss.
        with contextlib.suppress(ValueError, TypeError, KeyError):
            record = json.loads(line)
            return int(record["step"]), float(record["train/loss"])
    return 0, None


def _read_last_lines(file: Path) -> list[bytes]:
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _TAIL_BYTES))
            return stream.read().splitlines()
    except OSError:
        return []


def _read_total_steps(record: Mapping[str, Any], path: Path) -> int | None:
    """Returns the configured number of steps; None if neither run.json nor the configuration contains it."""
    identity = record.get("identity")
    trainer = identity.get("trainer") if isinstance(identity, dict) else None
    steps = trainer.get("num_train_steps") if isinstance(trainer, dict) else None
    if steps is None:
        # Parsing the configuration takes ten times as long as everything else.
        steps = read_trainer_setting(path / "config.yaml", "num_train_steps")
    return steps if isinstance(steps, int) else None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _file_sizes(directory: Path) -> Iterator[tuple[str, int]]:
    """Yields the files below a directory with their sizes in bytes. Skips files that are deleted in the meantime."""
    pending = [os.fspath(directory)]
    while pending:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                    continue
                with contextlib.suppress(OSError):
                    yield entry.path, entry.stat(follow_symlinks=False).st_size
