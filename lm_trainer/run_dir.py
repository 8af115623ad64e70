"""The directory of a run: what was asked for, on what it ran, what came out; held by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import platform
import shutil
import socket
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from lm_trainer.config.render import to_yaml
from lm_trainer.config.run import RunConfig, config_hash, numeric_differences, numeric_identity
from lm_trainer.config.trainer import TrainerConfig
from lm_trainer.core.config import Config
from lm_trainer.core.credentials import without_credentials
from lm_trainer.core.errors import UserError
from lm_trainer.core.files import make_writable, write_atomically
from lm_trainer.core.processes import is_lead, wait_for_all

logger = logging.getLogger(__name__)


def run_id(config: RunConfig, config_name: str) -> str:
    """The id in the configuration, else RUN_ID of the environment, else one made of the name and the numbers.

    The same configuration has the same id, so the same command resumes its run; another configuration gets another.
    """
    return config.trainer.id or os.environ.get("RUN_ID") or f"{config_name}-{config_hash(config)}"


def checkpoint_directory(trainer: TrainerConfig, name: str) -> Path:
    """Where the checkpoints of the run `name` lie."""
    base = Path(trainer.checkpointer.base_path)
    return base / name if trainer.checkpointer.append_run_id_to_base_path else base


class RunDirectory:
    """Opens or creates `log_dir`/id for one attempt at a run; use it as a context manager.

    Of several processes the first holds and writes it.

    Args:
        trainer: says where.
        settings: all that decides the run, with `trainer` as one of its sections.
        name: the run's id.

    Raises:
        UserError: when it cannot be written, is in use, or holds another configuration.
    """

    def __init__(self, trainer: TrainerConfig, settings: Config, name: str):
        self.name = name
        self.config = settings.model_copy(update={"trainer": trainer.model_copy(update={"id": name})})
        self.path = Path(trainer.log_dir) / name
        self.checkpoints = checkpoint_directory(trainer, name).absolute()
        self._locks = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if is_lead():
            self._hold()
        wait_for_all("run directory")
        return self

    def _hold(self) -> None:
        try:
            for directory in {self.path.absolute(), self.checkpoints}:
                make_writable(directory, "trainer.log_dir and trainer.checkpointer.base_path")
                self._locks.enter_context(_lock(directory))
            self._check_and_write()
        except BaseException:
            self._locks.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._locks.close()

    def _check_and_write(self) -> None:
        record = self.path / "run.json"
        identity = numeric_identity(self.config)
        if record.exists():
            differences = numeric_differences(json.loads(record.read_text())["identity"], identity)
            if differences:
                raise UserError(
                    f"{self.path} holds a run with another configuration:\n  "
                    + "\n  ".join(differences)
                    + "\nSet trainer.id to another name to start a new run, or undo these changes to resume this one"
                )
        text = without_credentials(to_yaml(self.config))
        for directory in (self.path, self.checkpoints):
            write_atomically(directory / "config.yaml", text)
        content = {"id": self.name, "checkpoints": str(self.checkpoints), "identity": identity}
        write_atomically(record, json.dumps(content, indent=1) + "\n")

    def write_artifact(self, name: str, artifact: Any) -> Path:
        """Writes text, bytes, a copy of a file or anything that JSON can hold to `artifacts`/name; returns its path."""
        file = self.path / "artifacts" / name
        if not is_lead():
            return file
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(artifact, Path):
            shutil.copyfile(artifact, file)
        elif isinstance(artifact, bytes):
            file.write_bytes(artifact)
        else:
            file.write_text(artifact if isinstance(artifact, str) else json.dumps(artifact, indent=1, default=str))
        return file

    def record_attempt(self, **facts: Any) -> dict[str, Any] | None:
        """Appends the environment and `facts` to env.json.

        Returns:
            The attempt before this one, None for the first (and in all processes but the first).
        """
        if not is_lead():
            return None
        file = self.path / "env.json"
        attempts = json.loads(file.read_text()) if file.exists() else []
        before = attempts[-1] if attempts else None
        write_atomically(file, json.dumps([*attempts, {**environment(), **facts}], indent=1) + "\n")
        return before


def environment() -> dict[str, Any]:
    """What may matter to someone who wants to reproduce the run, without host name, user or environment variables."""
    import jax

    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": dict(sorted((d.name.lower(), d.version) for d in metadata.distributions() if d.name)),
        "git": _git_commit(),
        "devices": [d.device_kind for d in jax.devices()],
        "processes": jax.process_count(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def _git_commit() -> str | None:
    """The commit of the checkout that this code runs from, marked when it has changes; None outside one."""
    here = Path(__file__).resolve().parent
    try:
        commit = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip()


@contextlib.contextmanager
def _lock(directory: Path) -> Any:
    """An advisory lock that ends with the process, however it ends."""
    with (directory / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                logger.warning(
                    "%s: its file system has no locks (%s), so nothing keeps a second process from writing there",
                    directory,
                    error.strerror,
                )
                yield
                return
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UserError(
                f"{directory} is in use by {holder}; wait for it, stop it, or set trainer.id to another name"
            ) from None
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
