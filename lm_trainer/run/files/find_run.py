"""Finds runs and their checkpoints by run ID or path."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_trainer.config.yaml_nodes import MAX_BYTES, read_file
from lm_trainer.config.yaml_syntax import INCLUDE
from lm_trainer.core.bucket import Bucket, StoragePath, is_bucket, storage_path
from lm_trainer.core.bucket_files import local_copy
from lm_trainer.core.errors import UserError
from lm_trainer.core.files import local_path, path_problem
from lm_trainer.export.files import CONFIG
from lm_trainer.run.files.records import COPY_DIRECTORY, read_run_record, recorded_checkpoint_directory

_LOGS, _CHECKPOINTS = Path("logs"), Path("checkpoints")
"""Default directories of runs and of checkpoints, relative to the working directory. Run IDs are looked up there."""


def read_log_directory(config: Path) -> Path:
    """Returns `trainer.log_dir` of a configuration file.

    Returns `logs` if it is not set, or if the file is not a configuration: callers may pass any YAML file in the
    working directory.
    """
    try:
        # Search the bytes first, so that most other files need not be parsed.
        small = config.is_file() and config.stat().st_size <= MAX_BYTES
        content = config.read_bytes() if small else b""
    except OSError:
        return _LOGS
    if not any(word in content for word in (b"log_dir", INCLUDE.encode())):
        return _LOGS
    # Errors in the file are ignored here; `lmt train` reports them.
    log_dir = read_trainer_setting(config, "log_dir")
    return local_path(log_dir) if isinstance(log_dir, str) and path_problem(log_dir) is None else _LOGS


def find_log_directories() -> list[Path]:
    """Returns the directories in which to search for runs.

    These are `logs`, and the log directories of the configurations in the working directory and in `configs`.
    """
    files = [*sorted(Path().glob("*.y*ml")), *sorted(Path("configs").glob("*.y*ml"))]
    return [*dict.fromkeys([_LOGS, *map(read_log_directory, files)])]


def read_trainer_setting(config: Path, key: str) -> Any:
    """Returns the value of a key in the section `trainer` of a file.

    Returns None if the key is not set, or if the file is not a configuration.
    """
    trainer = (read_file(config).data or {}).get("trainer")
    return trainer.get(key) if isinstance(trainer, dict) else None


def find_run(run: str | Path) -> Path:
    """Finds the directory of a run, given its ID, its path, or the URL of its checkpoints in a bucket.

    Returns:
        An absolute path. For a run in a bucket, the path of a local copy of its files without the checkpoints.

    Raises:
        UserError: if no such run exists (the message lists existing runs), or if a URL does not refer to a bucket.
    """
    if is_bucket(run):
        return _fetch_run_from_bucket(Bucket(str(run)))
    directories = find_log_directories()
    run = local_path(run)
    for candidate in (run, *(directory / run for directory in directories)):
        if (candidate / "run.json").is_file():
            return candidate.absolute()
    if (run / "config.yaml").is_file():
        raise UserError(f"{run} is a checkpoint directory; name the run directory, where its metrics.jsonl is")
    raise UserError(f"{run}: no run of this name, and no run directory{_list_runs_here('run.json', *directories)}")


def _fetch_run_from_bucket(checkpoints: Bucket) -> Path:
    if checkpoints.read(f"{COPY_DIRECTORY}/run.json") is None:
        raise UserError(f"{checkpoints}: there is no run{_list_runs_in_bucket(checkpoints)}")
    return local_copy(checkpoints, COPY_DIRECTORY) / COPY_DIRECTORY


def _list_runs_in_bucket(bucket: Bucket) -> str:
    """Lists the runs in a bucket, for the error message about a missing run."""
    tail = f"/{COPY_DIRECTORY}/run.json"
    runs = sorted(name.removesuffix(tail) for base in (bucket.parent, bucket) for name in base.list() if tail in name)
    return f"; runs in {bucket.parent}: {', '.join(runs)}" if runs else ""


def _find_checkpoints_in_bucket(path: Bucket) -> tuple[Bucket, int | None]:
    if path.read("config.yaml") is not None:
        return path, None
    if re.fullmatch(r"\d+", path.name) and path.parent.read("config.yaml") is not None:
        return path.parent, int(path.name)
    raise UserError(f"{path}: there is no checkpoint directory of a run")


def run_start_directory(run_dir: Path, log_dir: str) -> Path:
    """Returns the directory in which a run was started. Relative paths in its configuration refer to this directory.

    Args:
        run_dir: absolute path of the run directory.
        log_dir: `trainer.log_dir` of the configuration. If it is absolute, the working directory is returned.
    """
    logs = local_path(log_dir)
    tail = logs / run_dir.name
    below = not tail.is_absolute() and ".." not in tail.parts and run_dir.parts[-len(tail.parts) :] == tail.parts
    return run_dir.parents[len(logs.parts)] if below else Path.cwd()


def find_checkpoints(run: str | StoragePath, key: str | None = None) -> tuple[StoragePath, int | None]:
    """Finds a checkpoint directory, and returns it together with the step if `run` names one.

    Args:
        run: a run ID, a run directory (`logs/ID`), a checkpoint directory (`checkpoints/ID`, `s3://BUCKET/ID`) or one
            step in it.
        key: key of the configuration that names `run`, for the message.

    Raises:
        UserError: if there are no such checkpoints (the message lists existing runs), or if a URL does not refer to a
            bucket.
    """
    if isinstance(run, Bucket) or is_bucket(run):
        return _find_checkpoints_in_bucket(Bucket(str(run)))
    path = run = local_path(run)
    if re.fullmatch(r"\d+", path.name) and (path.parent / "config.yaml").is_file():
        return path.parent, int(path.name)
    logs = find_log_directories()
    for candidate in (path, *(directory / run for directory in logs), _CHECKPOINTS / run):
        # Looks for run.json first, because a run directory also contains a config.yaml.
        if (candidate / "run.json").is_file():
            return find_checkpoints_of_run(candidate), None
        if (candidate / "config.yaml").is_file():
            return candidate, None
    named = run if key is None else f"{key}: {run}"
    if (path / CONFIG).is_file():
        raise UserError(
            f"{named} is a model in Hugging Face's layout, not a run or checkpoint; make a checkpoint of it: "
            f"lmt import-hf {run} checkpoints/NAME"
        )
    hint = _list_runs_here("config.yaml", *logs, _CHECKPOINTS)
    raise UserError(f"{named}: no run of this name, and no run or checkpoint directory{hint}")


def find_checkpoints_of_run(run_dir: Path) -> StoragePath:
    """Returns the checkpoint directory of a run, which may have been moved since it was recorded in run.json.

    Raises:
        MachineError: if run.json is damaged.
    """
    return locate_checkpoints(read_run_record(run_dir), run_dir)


def locate_checkpoints(record: Mapping[str, Any], run_dir: Path) -> StoragePath:
    """Returns the checkpoint directory of a run, given the content of its run.json.

    Raises:
        MachineError: if run.json does not contain the directory.
    """
    recorded = storage_path(recorded_checkpoint_directory(record, run_dir))
    if isinstance(recorded, Bucket):
        return recorded
    # If the run was moved together with its checkpoints, their location relative to each other is unchanged.
    moved_with_run = run_dir.parent.parent / recorded.parent.name / recorded.name
    return recorded if recorded.is_dir() or not moved_with_run.is_dir() else moved_with_run


def _list_runs_here(file: str, *bases: Path) -> str:
    runs = sorted({path.parent.name for base in bases for path in base.glob(f"*/{file}")})
    return f"; runs here: {', '.join(runs)}" if runs else ""
