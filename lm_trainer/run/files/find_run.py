"""Discovery of runs and their checkpoints on disk, by a run id or a path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lm_trainer.config.yaml_nodes import MAX_BYTES, read_file
from lm_trainer.config.yaml_syntax import INCLUDE
from lm_trainer.core.bucket import Bucket, StoragePath, is_bucket, storage_path
from lm_trainer.core.bucket_files import local_copy
from lm_trainer.core.errors import UserError
from lm_trainer.core.files import local_path, path_problem
from lm_trainer.run.files.bucket_mirror import COPY
from lm_trainer.run.files.records import read_run_record, recorded_checkpoints

_LOGS, _CHECKPOINTS = Path("logs"), Path("checkpoints")
"""The directories of runs and of checkpoints by default, below the working directory; ids are looked up in them."""


def log_directory(config: Path) -> Path:
    """The directory of runs that a configuration file names as trainer.log_dir; `logs` where it names none, or is no
    configuration: it may be any file of the working directory.
    """
    try:
        # By its bytes first: most files that are no configurations need not be parsed.
        small = config.is_file() and config.stat().st_size <= MAX_BYTES
        content = config.read_bytes() if small else b""
    except OSError:
        return _LOGS
    if not any(word in content for word in (b"log_dir", INCLUDE.encode())):
        return _LOGS
    # Whatever is wrong with the file is the business of those who train by it.
    named = trainer_setting(config, "log_dir")
    return local_path(named) if isinstance(named, str) and path_problem(named) is None else _LOGS


def log_directories() -> list[Path]:
    """The directories in which runs are looked for: `logs`, and those that the configurations here name."""
    files = [*sorted(Path().glob("*.y*ml")), *sorted(Path("configs").glob("*.y*ml"))]
    return [*dict.fromkeys([_LOGS, *map(log_directory, files)])]


def trainer_setting(config: Path, key: str) -> Any:
    """The value of a key of the section `trainer` in a file that may be no configuration; None where it has none."""
    trainer = (read_file(config).data or {}).get("trainer")
    return trainer.get(key) if isinstance(trainer, dict) else None


def find_run(run: str | Path) -> Path:
    """Finds the directory of a run by its id, its path, or the URL of its checkpoints in a bucket.

    Returns:
        An absolute path; of a run in a bucket, that of a local copy of its files without the checkpoints.

    Raises:
        UserError: when there is none, naming those that there are, and for a URL that is none of a bucket.
    """
    if is_bucket(run):
        return _copy_of(Bucket(str(run)))
    places = log_directories()
    run = local_path(run)
    for candidate in (run, *(place / run for place in places)):
        if (candidate / "run.json").is_file():
            return candidate.absolute()
    if (run / "config.yaml").is_file():
        raise UserError(f"{run} is a checkpoint directory; name the run directory, where its metrics.jsonl is")
    raise UserError(f"{run}: no run of this name, and no run directory{_runs_here('run.json', *places)}")


def _copy_of(checkpoints: Bucket) -> Path:
    if checkpoints.read(f"{COPY}/run.json") is None:
        raise UserError(f"{checkpoints}: there is no run{_runs_in(checkpoints)}")
    return local_copy(checkpoints, COPY) / COPY


def _runs_in(bucket: Bucket) -> str:
    """The runs that a bucket holds, where it is asked for one that it does not."""
    tail = f"/{COPY}/run.json"
    known = sorted(name.removesuffix(tail) for base in (bucket.parent, bucket) for name in base.list() if tail in name)
    return f"; runs in {bucket.parent}: {', '.join(known)}" if known else ""


def _in_bucket(path: Bucket) -> tuple[Bucket, int | None]:
    if path.read("config.yaml") is not None:
        return path, None
    if re.fullmatch(r"\d+", path.name) and path.parent.read("config.yaml") is not None:
        return path.parent, int(path.name)
    raise UserError(f"{path}: there is no checkpoint directory of a run")


def root_of(run_dir: Path, log_dir: str) -> Path:
    """The directory in which a run was started, from which relative paths of its configuration count.

    Args:
        run_dir: absolute.
        log_dir: trainer.log_dir of its configuration; of an absolute one, the working directory is taken.
    """
    logs = local_path(log_dir)
    tail = logs / run_dir.name
    below = not tail.is_absolute() and ".." not in tail.parts and run_dir.parts[-len(tail.parts) :] == tail.parts
    return run_dir.parents[len(logs.parts)] if below else Path.cwd()


def find_checkpoints(run: str | StoragePath) -> tuple[StoragePath, int | None]:
    """Finds the checkpoint directory that is meant, and the step, if one was named.

    Args:
        run: a run id, a run directory (`logs/ID`), a checkpoint directory (`checkpoints/ID`, `s3://BUCKET/ID`) or one
            step in it.

    Raises:
        UserError: when there is none, naming those that there are, and for a URL that is none of a bucket.
    """
    if isinstance(run, Bucket) or is_bucket(run):
        return _in_bucket(Bucket(str(run)))
    path = run = local_path(run)
    if re.fullmatch(r"\d+", path.name) and (path.parent / "config.yaml").is_file():
        return path.parent, int(path.name)
    logs = log_directories()
    for candidate in (path, *(place / run for place in logs), _CHECKPOINTS / run):
        # First run.json: a run directory has a config.yaml as well.
        if (candidate / "run.json").is_file():
            return checkpoints_of(candidate), None
        if (candidate / "config.yaml").is_file():
            return candidate, None
    there = _runs_here("config.yaml", *logs, _CHECKPOINTS)
    raise UserError(f"{run}: no run of this name, and no run or checkpoint directory{there}")


def checkpoints_of(run_dir: Path) -> StoragePath:
    """Returns the checkpoint directory of a run, which may have been moved since it was written down in run.json.

    Raises:
        MachineError: when run.json is damaged.
    """
    recorded = storage_path(recorded_checkpoints(read_run_record(run_dir), run_dir))
    if isinstance(recorded, Bucket):
        return recorded
    # A run that was moved as a whole keeps its checkpoints beside it.
    beside = run_dir.parent.parent / recorded.parent.name / recorded.name
    return recorded if recorded.is_dir() or not beside.is_dir() else beside


def _runs_here(file: str, *bases: Path) -> str:
    known = sorted({path.parent.name for base in bases for path in base.glob(f"*/{file}")})
    return f"; runs here: {', '.join(known)}" if known else ""
