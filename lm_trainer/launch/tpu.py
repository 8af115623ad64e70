"""Launches runs on Cloud TPU VMs: requests a TPU, installs and trains, and repeats all three after a preemption."""

from __future__ import annotations

import re
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lm_trainer.core.errors import EXIT_CRASH, EXIT_PREEMPTED, EXIT_STOPPED, MachineError, UserError
from lm_trainer.launch.gcloud import Gcloud
from lm_trainer.launch.tpu_scripts import (
    EXIT_MARK,
    FAILURE_MARK,
    LOST,
    build_scripts,
    follow_command,
    remote_directory,
    script_command,
    write_files,
)

EXIT_INTERRUPTED = 130

_RUNTIMES = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
"""Runtime version that Google recommends for JAX on each TPU generation.

Source: Cloud TPU documentation, "TPU software versions".
"""

_OVER = ("FAILED", "SUSPENDING", "SUSPENDED", "DELETING")
"""States of a queued resource that has no TPU and will not get one."""
_FAILURES_IN_QUEUE = 3
"""Number of consecutive failed requests for a TPU after which the launcher gives up."""


@dataclass(frozen=True)
class TpuJob:
    """Settings of a run on a Cloud TPU. None leaves a setting to the configuration of gcloud or to the default below.

    Raises:
        UserError: for an invalid Google Cloud name, accelerator or option, or a TPU generation without a known runtime
            version.
    """

    name: str
    accelerator: str
    """Type and size in Cloud TPU's notation, such as `v5p-128` or `v6e-16`. `v5e-16` means `v5litepod-16`."""
    zone: str
    project: str | None = None
    version: str | None = None
    """Runtime version; None selects the version recommended for JAX on this TPU generation."""
    spot: bool = False
    create_options: tuple[str, ...] = ()
    """Extra options of `queued-resources create`, such as `--network=NAME`."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the training process on every worker."""
    install: str | None = None
    """Pip requirement for lm_trainer; None installs the source tree of the running lm_trainer."""
    setup: str | None = None
    """Bash command to run on every worker before training, for example to mount a bucket."""
    delete: bool = False
    """Delete the TPU when the run ends, whether it finished, failed or was stopped on request."""
    on_interrupt: Literal["stop", "leave"] = "stop"
    """Reaction to Ctrl-C: `stop` asks the training to save and stop, and `leave` lets it continue."""
    restarts: int = 100
    """Maximum number of restarts of a preempted run."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,58}[a-z0-9])?", self.name):
            raise UserError(f"--name {self.name!r}: Google Cloud wants lower-case letters, digits and '-'")
        if not re.fullmatch(r"\w+-\d+", self.accelerator):
            raise UserError(f"--accelerator {self.accelerator!r}: expected a type and a size, such as v5p-128")
        if self.version is None and self.accelerator_type.split("-")[0] not in _RUNTIMES:
            raise UserError(
                f"--accelerator {self.accelerator}: no runtime version is known for it; give one by --version "
                f"(`gcloud compute tpus versions list` shows them). TPU7x is to be had by `lmt launch k8s` alone"
            )
        wrong = [option for option in self.create_options if not option.startswith("--")]
        if wrong:
            raise UserError(f"{wrong[0]!r} is no option of gcloud; write it as --gcloud=--network=NAME")

    @property
    def accelerator_type(self) -> str:
        """The accelerator type as gcloud spells it."""
        return re.sub(r"^v5e-", "v5litepod-", self.accelerator)

    @property
    def runtime_version(self) -> str:
        return self.version or _RUNTIMES[self.accelerator_type.split("-")[0]]

    @property
    def gcloud(self) -> Gcloud:
        return Gcloud(self.name, self.zone, self.project)

    @property
    def create_arguments(self) -> list[str]:
        """Arguments of `queued-resources create` that follow the name."""
        return [
            f"--node-id={self.name}",
            f"--accelerator-type={self.accelerator_type}",
            f"--runtime-version={self.runtime_version}",
            *(["--spot"] if self.spot else []),
            *self.create_options,
        ]

    def build_scripts(self, config_name: str) -> dict[str, str]:
        """Builds the scripts for the workers, by file name."""
        return build_scripts(config_name, self.env, self.install, self.setup)


def describe_commands(job: TpuJob, config_name: str) -> Iterator[str]:
    """Yields the shell commands of an attempt in order, and the contents of the scripts, each with a comment."""
    gcloud, directory = job.gcloud, remote_directory(job.name)
    steps = [
        ("ask for the TPU", gcloud.create_command(job.create_arguments)),
        ("repeated until the state is ACTIVE", gcloud.describe_command()),
        ("the configuration, the scripts below and lm_trainer, to every worker", gcloud.copy_command(Path(directory))),
        ("install, on every worker", gcloud.ssh_command(script_command(job.name, "install"))),
        ("start training, on every worker", gcloud.ssh_command(script_command(job.name, "start"))),
        ("the output of worker 0; from the next line on, if the connection breaks", _follow_command(gcloud, 1)),
        ("at Ctrl-C: save and stop", gcloud.ssh_command(script_command(job.name, "stop"))),
        (
            "after a preemption, before asking again" + ("; and when the run is over" * job.delete),
            gcloud.delete_command(),
        ),
    ]
    for comment, command in steps:
        yield f"# {comment}"
        yield shlex.join(command)
    for name, text in job.build_scripts(config_name).items():
        yield f"# {directory}/{name}:"
        yield from (f"#   {line}" for line in text.splitlines())


def _follow_command(gcloud: Gcloud, line: int) -> list[str]:
    return gcloud.ssh_command(follow_command(gcloud.name, line), worker="0")


class _TpuLost(Exception):
    """Google Cloud took the TPU away (preemption)."""


class TpuRun:
    """One run on a TPU, which this process follows until the run ends.

    The training does not depend on this process: it continues if the connection breaks or this machine is switched off.
        Running the same command a second time follows the same training.

    Args:
        job: settings of the run.
        config: content of the configuration file to train.
        config_name: name of the configuration file, which becomes the name of the run.
        write: receives each line of output.
        interval: number of seconds between two queries of the state of the TPU.
        settle: maximum time in seconds, after a failure, until Google Cloud reports the preemption that caused it.
    """

    def __init__(
        self,
        job: TpuJob,
        config: str,
        config_name: str,
        write: Callable[[str], object],
        *,
        interval: float = 30.0,
        settle: float = 60.0,
    ):
        self._job, self._config, self._config_name, self._write = job, config, config_name, write
        self._gcloud, self._interval, self._settle = job.gcloud, interval, settle
        self._started = False
        self._next_line = 1

    def run(self) -> int:
        """Trains to the end, and requests another TPU after each preemption.

        Returns:
            The exit code of the training, or 130 if the launcher was interrupted before the training ended.

        Raises:
            UserError: if gcloud is not installed, or Google Cloud refuses the request.
            MachineError: if an installation fails, requests fail repeatedly, or the run is preempted too often.
        """
        try:
            code = self._run_attempts()
        except KeyboardInterrupt:
            code = self._handle_interrupt()
        if code != EXIT_INTERRUPTED:
            self._write(f"the run ended with exit code {code}")
        self._release(delete=self._job.delete and (code != EXIT_INTERRUPTED or not self._started))
        return code

    def _run_attempts(self) -> int:
        for attempt in range(self._job.restarts + 1):
            if attempt:
                self._write(f"starting again ({attempt} of at most {self._job.restarts} times)")
            try:
                self._acquire()
                self._prepare()
                code = self._train()
            except _TpuLost:
                self._write("the TPU was taken away (preempted)")
                continue
            if code in (EXIT_PREEMPTED, LOST):
                continue
            if code == EXIT_CRASH and self._is_lost():
                self._write("the TPU was taken away (preempted)")
                continue
            if code not in (0, EXIT_STOPPED):
                self._show_last_lines()
            return code
        raise MachineError(f"the run was stopped more than {self._job.restarts} times (--restarts)")

    def _acquire(self) -> None:
        """Waits for the TPU, and requests one unless an earlier command has done so."""
        failures, shown = 0, ""
        while True:
            state = self._gcloud.query_state()
            if state.name == "ACTIVE":
                return
            if state.name == "FAILED":
                failures += 1
                self._write(f"the request failed: {state.reason}")
                if failures == _FAILURES_IN_QUEUE:
                    raise MachineError(f"{self._job.name}: {failures} requests failed, the last one: {state.reason}")
            if state.name in _OVER:
                self._gcloud.run_command(self._gcloud.delete_command())
            if state.name in (*_OVER, ""):
                self._write(f"asking for {self._job.accelerator_type} in {self._job.zone} as {self._job.name}")
                self._gcloud.run_command(self._gcloud.create_command(self._job.create_arguments))
            elif state.name != shown:
                shown = state.name
                self._write(f"{self._job.name} is {shown}")
            time.sleep(self._interval)

    def _prepare(self) -> None:
        if self._is_running():
            self._write("the training is running already")
            return
        with tempfile.TemporaryDirectory() as base:
            staged = Path(base) / remote_directory(self._job.name)
            staged.mkdir()
            texts = {self._config_name: self._config, **self._job.build_scripts(self._config_name)}
            write_files(staged, texts, source=self._job.install is None)
            self._write("copying and installing on every worker")
            self._run_on_workers(self._gcloud.copy_command(staged))
        self._run_on_workers(self._script_command("install"))

    def _script_command(self, name: str) -> list[str]:
        return self._gcloud.ssh_command(script_command(self._job.name, name))

    def _is_running(self) -> bool:
        try:
            return not any(FAILURE_MARK in line for line in self._gcloud.stream_output(self._script_command("running")))
        except MachineError:
            return False

    def _run_on_workers(self, command: list[str]) -> None:
        lines: list[str] = []
        try:
            lines.extend(self._gcloud.stream_output(command))
            failed = any(FAILURE_MARK in line for line in lines)
        except MachineError:
            failed = True
        if failed and self._is_lost():
            raise _TpuLost
        if failed:
            raise MachineError("\n".join([f"`{shlex.join(command)}` failed:", *lines[-20:]]))

    def _train(self) -> int:
        self._run_on_workers(self._script_command("start"))
        self._started, self._next_line = True, 1
        return self._follow_output()

    def _follow_output(self) -> int:
        """Forwards the output of worker 0 until the training ends, and returns the exit code of the training."""
        while True:
            try:
                for line in self._gcloud.stream_output(_follow_command(self._gcloud, self._next_line)):
                    if line.startswith(EXIT_MARK):
                        return int(line.removeprefix(EXIT_MARK))
                    self._next_line += 1
                    self._write(line)
            except MachineError:
                if self._is_lost():
                    raise _TpuLost from None
            self._write("the connection to worker 0 broke; connecting again")
            time.sleep(self._interval)

    def _is_lost(self) -> bool:
        """Returns True if the TPU is gone. Google Cloud may report this only some time after the workers disappear."""
        end = time.monotonic() + self._settle
        while self._gcloud.query_state().name == "ACTIVE":
            if time.monotonic() >= end:
                return False
            time.sleep(min(self._interval, 5.0))
        return True

    def _handle_interrupt(self) -> int:
        if not self._started or self._job.on_interrupt == "leave":
            return EXIT_INTERRUPTED
        self._write("interrupted: the training saves and stops; once more leaves it to that")
        try:
            self._run_on_workers(self._script_command("stop"))
            return self._follow_output()
        except (KeyboardInterrupt, _TpuLost):
            return EXIT_INTERRUPTED

    def _show_last_lines(self) -> None:
        """Shows the last output lines of every worker, because the first worker to fail may not be worker 0."""
        command = self._gcloud.ssh_command(f"tail -n 20 {remote_directory(self._job.name)}/log")
        try:
            for line in self._gcloud.stream_output(command):
                self._write(f"  | {line}")
        except MachineError as error:
            self._write(f"the logs of the workers could not be read: {error}")

    def _release(self, *, delete: bool) -> None:
        command = self._gcloud.delete_command()
        if delete:
            self._write(f"deleting {self._job.name}")
            self._gcloud.run_command(command)
        else:
            self._write(f"{self._job.name} is kept, and costs; delete it by: {shlex.join(command)}")
