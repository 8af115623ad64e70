"""Builds and runs `gcloud compute tpus` commands for one queued resource."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lm_trainer.core.errors import MachineError, UserError

_NO_GCLOUD = "there is no gcloud on this machine; install the Google Cloud CLI, or look at the commands with --dry-run"


class State(NamedTuple):
    """The state of a queued resource."""

    name: str
    """State in Google Cloud's spelling, such as `ACTIVE`; empty if the resource does not exist."""
    reason: str
    """Error message of a failed request."""


@dataclass(frozen=True)
class Gcloud:
    """The commands for the queued resource `name`, whose only node has the same name."""

    name: str
    zone: str
    project: str | None = None

    def create(self, arguments: Sequence[str]) -> list[str]:
        return self._command("queued-resources", "create", self.name, *arguments, "--quiet")

    def describe(self) -> list[str]:
        return self._command("queued-resources", "describe", self.name, "--format=json")

    def delete(self) -> list[str]:
        # --force deletes the TPU of the resource too.
        return self._command("queued-resources", "delete", self.name, "--force", "--quiet")

    def ssh(self, command: str, worker: str = "all") -> list[str]:
        return self._command("tpu-vm", "ssh", self.name, f"--worker={worker}", f"--command={command}", "--quiet")

    def copy(self, source: Path) -> list[str]:
        """Copies a directory into the home directory of every worker."""
        return self._command("tpu-vm", "scp", "--recurse", str(source), f"{self.name}:", "--worker=all", "--quiet")

    def state(self) -> State:
        """Queries the state.

        Raises:
            UserError: if gcloud is not installed.
            MachineError: if gcloud fails.
        """
        done = _run(self.describe())
        if done.returncode:
            if "NOT_FOUND" in done.stderr:
                return State("", "")
            raise MachineError(f"`{shlex.join(self.describe())}` failed: {_reason(done)}")
        state = json.loads(done.stdout)["state"]
        return State(state["state"], state.get("failedData", {}).get("error", {}).get("message", "no reason given"))

    def call(self, command: list[str]) -> None:
        """Runs a command; if it fails, raises `UserError` with gcloud's message."""
        done = _run(command)
        if done.returncode:
            raise UserError(f"`{shlex.join(command)}` failed: {_reason(done)}")

    def stream(self, command: list[str]) -> Iterator[str]:
        """Yields each line of output as it comes; raises `MachineError` after the last one if the command failed."""
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        except FileNotFoundError:
            raise UserError(_NO_GCLOUD) from None
        with process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    yield line.decode(errors="replace").rstrip("\r\n")
            finally:
                # A reader that stops early must not wait for the rest of the output.
                if process.poll() is None:
                    process.stdout.close()
                    process.terminate()
        if process.returncode:
            raise MachineError(f"`{shlex.join(command)}` failed with exit code {process.returncode}")

    def _command(self, *parts: str) -> list[str]:
        project = [] if self.project is None else [f"--project={self.project}"]
        return ["gcloud", "compute", "tpus", *parts, f"--zone={self.zone}", *project]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(_NO_GCLOUD) from None


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip() or f"exit code {done.returncode}"
