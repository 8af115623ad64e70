"""The directory of a run, with its configuration, environment and results. One process at a time can lock it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from lm_trainer.checkpoint.store import list_steps
from lm_trainer.config.render import to_yaml
from lm_trainer.core.bucket import Bucket, StoragePath, read_json, storage_path
from lm_trainer.core.bucket_files import staging_directory
from lm_trainer.core.config import Config
from lm_trainer.core.errors import UserError
from lm_trainer.core.file_lock import try_lock
from lm_trainer.core.files import ensure_writable_directory, local_path, write_atomically
from lm_trainer.core.lease import Lease
from lm_trainer.core.process_id import ProcessId
from lm_trainer.core.safe_names import path_inside
from lm_trainer.parallel.processes import gather_texts, is_lead, wait_for_all
from lm_trainer.run.config.recorded_keys import config_with_recorded_keys
from lm_trainer.run.config.run_config import RunConfig, config_hash, numeric_differences, numeric_identity
from lm_trainer.run.config.run_id import explain_invalid_run_id
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.files.branch import BRANCH, BranchPoint
from lm_trainer.run.files.bucket_mirror import BucketMirror
from lm_trainer.run.files.environment import (
    continued_attempt_notes,
    describe_environment,
    first_attempt_notes,
    num_cpu_threads_for_rerun,
)
from lm_trainer.run.files.records import (
    COPY_DIRECTORY,
    ENVIRONMENT,
    RUN,
    RecordCopies,
    parse_attempts,
    parse_run_record,
    read_attempts,
    read_run_record,
    recorded_identity,
)

logger = logging.getLogger(__name__)

PROGRAMS = "programs"
"""Name of the directory with the compiled programs of a run, in its run directory."""

_EFFECTS = {
    RUN: "the configuration cannot be compared with that of the steps that are there",
    ENVIRONMENT: "what computed the steps so far is not known, so that later ones may have other bits than they would",
}
"""Consequences of a missing record, by the name of the record, for the warning."""


def choose_run_id(config: RunConfig, config_name: str) -> str:
    """Returns the run ID: `trainer.id`, or the environment variable RUN_ID, or the configuration's name and hash.

    The default ID is the same for the same configuration. The same command therefore resumes its run, and a command
    with a different configuration starts another run.

    Raises:
        UserError: for an invalid RUN_ID.
    """
    if config.trainer.id:
        return config.trainer.id
    env_id = os.environ.get("RUN_ID")
    if env_id and (problem := explain_invalid_run_id(env_id)):
        raise UserError(f"RUN_ID in the environment: {problem}")
    return env_id or f"{config_name}-{config_hash(config)}"


def checkpoint_directory(trainer: TrainerConfig, name: str) -> StoragePath:
    """Returns the checkpoint directory of the run `name`."""
    return storage_path(trainer.checkpointer.expanded_path(name))


class RunDirectory:
    """Context manager that opens or creates `log_dir`/id for one attempt at a run.

    Only the first of several processes locks the directory and writes to it. If the checkpoints are in a bucket, a copy
    of the directory is kept next to them. It replaces the local directory if that is missing or older.

    Args:
        trainer: trainer section, which contains the paths of the directories.
        settings: complete configuration of the run, with `trainer` as one of its sections.
        name: the run ID.
        allow_change: allow the run to continue with a changed configuration. The change takes effect, and is recorded,
            with the first step that is computed with it.
        on_wait: called with a message if the run has to wait for another process before it can start.

    Raises:
        UserError: if the directory cannot be written, is in use, or contains another configuration.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        settings: Config,
        name: str,
        *,
        allow_change: bool = False,
        on_wait: Callable[[str], Any] | None = None,
    ):
        self.name, self.allow_change = name, allow_change
        self._differences: list[str] = []
        self.config = settings.model_copy(update={"trainer": trainer.model_copy(update={"id": name})})
        self.path = local_path(trainer.log_dir) / name
        checkpoints = checkpoint_directory(trainer, name)
        self.checkpoints: StoragePath = checkpoints.absolute() if isinstance(checkpoints, Path) else checkpoints
        self.branch: BranchPoint | None = None
        """Start of the run, if it is a branch. `restore_recorded_keys` reads it."""
        self._locks = contextlib.ExitStack()
        self._records = RecordCopies(self.path, self.checkpoints, name)
        self.chain = ""
        """Hash of the steps before this attempt (see `extend_chain`). It is set once these steps are known."""
        self.notes: list[str] = []
        self._copy = BucketMirror(self.path, self.checkpoints) if isinstance(self.checkpoints, Bucket) else None
        self._lease: Lease | None = None
        self._probed = False
        self._on_wait = on_wait

    def __enter__(self) -> Self:
        # The other processes wait until the directory is complete, or the first process has raised an exception.
        if is_lead():
            self._lock_directories()
        wait_for_all("run directory")
        return self

    def _lock_directories(self) -> None:
        try:
            for directory in self._local_directories():
                _refuse_links(directory)
                ensure_writable_directory(directory, "trainer.log_dir and trainer.checkpointer.base_path")
                self._locks.enter_context(lock_directory(directory))
            if self._copy is not None:
                self._lock_bucket(self._copy)
            self._check_configuration()
            if self._copy is not None:
                self._locks.enter_context(self._copy)
        # `__exit__` is not called if `__enter__` raises.
        except BaseException:
            self._locks.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._locks.close()

    def _local_directories(self) -> set[Path]:
        # Uses a set of resolved paths, because both paths may refer to the same directory, which cannot be locked
        # twice.
        return {path.resolve() for path in (self.path, self.checkpoints) if isinstance(path, Path)}

    def _lock_bucket(self, copy: BucketMirror) -> None:
        assert isinstance(self.checkpoints, Bucket)
        self._probe_bucket()
        self._lease = self._locks.enter_context(Lease(self.checkpoints, self._on_wait))
        recorded_id = read_json(self.checkpoints, f"{COPY_DIRECTORY}/run.json").get("id", self.name)
        if recorded_id != self.name:
            raise UserError(
                f"{self.checkpoints} holds the checkpoints of the run {recorded_id}; choose another place with "
                f"trainer.checkpointer.base_path, or let append_run_id_to_base_path give each run one of its own"
            )
        copy.fetch()

    def _probe_bucket(self) -> None:
        """Checks once that the bucket can be used.

        The check fails quickly, while other requests are retried for minutes.
        """
        if isinstance(self.checkpoints, Bucket) and not self._probed:
            self.checkpoints.check_writable("trainer.checkpointer.base_path")
            self._probed = True

    def before_commit(self, seconds: float) -> None:
        """Verifies the lease and updates the copy of the run directory before a checkpoint is committed in a bucket.

        Args:
            seconds: time limit per request.

        Raises:
            MachineError: if another process has taken over the run, or the bucket cannot be written.
        """
        if self._lease is not None and self._copy is not None:
            # Copies first, so that a run that resumes from the checkpoint finds the metrics up to its step.
            self._copy.push(seconds)
            self._lease.confirm()

    def check_lock_held(self) -> None:
        """Raises `MachineError` if another process has taken over the run, which cannot be prevented in a bucket."""
        if self._lease is not None:
            self._lease.check()

    def _check_configuration(self) -> None:
        self._restore_records()
        record = read_run_record(self.path) if (self.path / RUN).exists() else {}
        if record:
            self._differences = numeric_differences(
                recorded_identity(record, self.path), numeric_identity(self.config), self.config
            )
        if self._differences and not self.allow_change:
            raise UserError(
                f"{self.path} holds a run with another configuration:\n  "
                + "\n  ".join(self._differences)
                + "\nSet trainer.id to another name to start a new run, undo these changes to resume this one, or go "
                "on with them by --allow-config-change, which is written down in the run's records"
            )
        # A change is only recorded when the first step is computed with it. Until then the files describe the existing
        # steps.
        if not self._differences:
            self._write_records(record.get("changes", []))

    def _restore_records(self) -> None:
        for name in self._records.restore():
            self.notes.append(
                f"warning: {self.path / name} was missing, and is back from the copy beside the checkpoints"
            )
        missing = [name for name in _EFFECTS if not (self.path / name).exists()]
        # A branch that has not begun has the checkpoint of its first step, and no attempt.
        begun = [step for step in list_steps(self.checkpoints) if self.branch is None or step != self.branch.step]
        if missing and begun:
            self.notes += [
                f"warning: {self.path / name} is missing, and there is no copy: {_EFFECTS[name]}" for name in missing
            ]

    def _write_records(self, changes: list[dict[str, Any]]) -> None:
        content = {"id": self.name, "checkpoints": str(self.checkpoints), "identity": numeric_identity(self.config)}
        if changes:
            content["changes"] = changes
        if self.branch is not None:
            content[BRANCH] = self.branch.to_record()
        self._records.write(RUN, json.dumps(content, indent=1) + "\n")
        text = to_yaml(self.config, redact=True)
        write_atomically(self.path / "config.yaml", text)
        with staging_directory(self.checkpoints) as directory:
            write_atomically(directory / "config.yaml", text)
        # Settings of a program of the user need not have a model.
        for file in getattr(getattr(self.config, "model", None), "code_files", ()):
            if file.is_file():
                self.write_artifact(file.name, file)

    def set_branch(self, point: BranchPoint) -> None:
        """Records that the run is a branch. The directory must be entered, and the run must not have begun."""
        self.branch = point
        if is_lead():
            self._write_records([])

    def write_artifact(self, name: str, artifact: Any) -> Path:
        """Writes text, bytes, a copy of a file or a JSON-serialisable value to `artifacts`/name. Returns the path."""
        file = self.path / "artifacts" / name
        if not is_lead():
            return file
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(artifact, Path):
            artifact = artifact.read_bytes()
        elif not isinstance(artifact, str | bytes):
            artifact = json.dumps(artifact, indent=1, default=str)
        write_atomically(file, artifact)
        return file

    def num_cpu_threads(self, trainer: TrainerConfig) -> int | None:
        """Returns the number of CPU threads in the configuration or of the last attempt; None if neither has one."""
        # On a CPU, XLA splits sums according to its number of threads, so a resumed run needs the same number to give
        # the same bits.
        attempts = self._read_attempts() if trainer.bitwise else []
        if not attempts and trainer.bitwise:
            # A branch goes on with the number of threads of its parent.
            branch = BranchPoint.from_record(self.read_own_record() or {}, self.path / RUN)
            attempts = [] if branch is None else [{"cpu_threads": branch.cpu_threads}]
        return num_cpu_threads_for_rerun(trainer, attempts[-1] if attempts else {})

    def read_own_record(self) -> dict[str, Any] | None:
        """Returns the content of run.json, also from a newer copy in a bucket; None if the run does not exist yet."""
        content = self._read_unlocked(RUN)
        return None if content is None else parse_run_record(self.path / RUN, content)

    def _read_attempts(self) -> list[dict[str, Any]]:
        return parse_attempts(self.path / ENVIRONMENT, self._read_unlocked(ENVIRONMENT))

    def _read_unlocked(self, name: str) -> bytes | None:
        """Reads a record before the directory is locked, and before a newer copy may replace it."""
        if self._copy is not None:
            self._probe_bucket()
            content = self._copy.read(name)
        else:
            content = (self.path / name).read_bytes() if (self.path / name).exists() else None
        # A missing record is restored once the directory is locked.
        return self._records.read(name) if content is None else content

    @property
    def trainer(self) -> TrainerConfig:
        """The trainer section of `config`."""
        settings: Any = self.config
        return settings.trainer

    def restore_recorded_keys(self) -> None:
        """Sets keys that are not set to the values recorded at the start of the run; see `trainer_with_recorded_keys`.

        Also reads the start of a branch. All processes must call this method, which waits for the others.
        """
        record = self.read_own_record() if is_lead() else None
        local = {} if record is None else {"identity": recorded_identity(record, self.path), BRANCH: record.get(BRANCH)}
        # It may be that only the first process can access the directory.
        shared = json.loads(gather_texts(json.dumps(local))[0])
        self.branch = BranchPoint.from_record(shared, self.path / RUN)
        self.config = config_with_recorded_keys(self.config, shared.get("identity", {}))

    def record_attempt(self, trainer: TrainerConfig, *, step: int, rows: int, program: Mapping[str, str]) -> list[str]:
        """Records the environment of this attempt in env.json, and a changed configuration in run.json.

        Args:
            trainer: trainer section of the configuration.
            step: number of completed steps.
            rows: number of rows of a microbatch.
            program: hashes of the compiled program for a microbatch, by their keys in env.json.

        Returns:
            Notes for the user about differences from the previous attempt, or about the first attempt. The list is
            empty in all processes except the first.
        """
        if not is_lead():
            return []
        file, attempts = self.path / ENVIRONMENT, read_attempts(self.path)
        attempt = {**describe_environment(), "step": step, "rows": rows, **program, "chain": self.chain}
        resumed = step and attempts
        remarks = (
            continued_attempt_notes(attempts[-1], attempt, file) if resumed else first_attempt_notes(attempt, trainer)
        )
        notes = [*self._record_change(step), *remarks]
        self._records.write(ENVIRONMENT, json.dumps([*attempts, attempt], indent=1) + "\n")
        return notes

    def _record_change(self, step: int) -> list[str]:
        changes = read_run_record(self.path).get("changes", [])
        # If a checkpoint was lost, the steps after an earlier checkpoint are recomputed with the newest configuration.
        updated = [{**change, "step": min(change["step"], step)} for change in changes]
        if self._differences:
            old_config = f"config.{len(changes) + 1}.yaml"
            self._records.write(old_config, (self.path / "config.yaml").read_text())
            updated.append({"step": step, "differences": self._differences, "config_before": old_config})
        if updated != changes:
            self._write_records(updated)
        lines, self._differences = self._differences, []
        return [f"from step {step} on with another configuration:\n  " + "\n  ".join(lines)] if lines else []


def record_branch(config: RunConfig, name: str, point: BranchPoint) -> RunDirectory:
    """Creates the directory of a run that is a branch, which can then be started. Returns the closed directory.

    Raises:
        UserError: as for `RunDirectory`.
    """
    with RunDirectory(config.trainer, config, name) as directory:
        directory.set_branch(point)
    return directory


def _refuse_links(directory: Path) -> None:
    """Raises `UserError` for symbolic links through which this process could write to files outside of the directory.

    Checkpoints may be links, because they are never rewritten.
    """
    for entry in [*directory.iterdir()] if directory.is_dir() else ():
        if entry.is_symlink() and not entry.name.isdecimal():
            path_inside(directory, entry.name, directory)


@contextlib.contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Holds an advisory lock on a directory, which is released when the process ends for any reason.

    Raises:
        UserError: if another process holds the lock.
    """
    with (directory / ".lock").open("a+") as file:
        try:
            acquired = try_lock(file.fileno())
        except OSError as error:
            logger.warning(
                "%s: its file system has no locks (%s), so nothing keeps a second process from writing there",
                directory,
                error.strerror,
            )
            yield
            return
        if not acquired:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UserError(
                f"{directory} is in use by {holder}; wait for it, stop it, or set trainer.id to another name"
            )
        # Records the process that holds the lock, for the error message of a second process.
        file.seek(0)
        file.truncate()
        file.write(str(ProcessId.of_this_process()))
        file.flush()
        yield
