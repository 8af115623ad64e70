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


class ResourceState(NamedTuple):
    """The state of a queued resource."""

    name: str
    """Name of the state as Google Cloud spells it, such as `ACTIVE`; empty if the resource does not exist."""
    reason: str
    """Error message of a failed request."""


@dataclass(frozen=True)
class Gcloud:
    """Builds and runs gcloud commands for the queued resource `name`, whose only node has the same name."""

    name: str
    zone: str
    project: str | None = None

    def create_command(self, arguments: Sequence[str]) -> list[str]:
        return self._build_command("queued-resources", "create", self.name, *arguments, "--quiet")

    def describe_command(self) -> list[str]:
        return self._build_command("queued-resources", "describe", self.name, "--format=json")

    def delete_command(self) -> list[str]:
        # --force also deletes the TPU that belongs to the resource.
        return self._build_command("queued-resources", "delete", self.name, "--force", "--quiet")

    def ssh_command(self, command: str, worker: str = "all") -> list[str]:
        return self._build_command("tpu-vm", "ssh", self.name, f"--worker={worker}", f"--command={command}", "--quiet")

    def copy_command(self, source: Path) -> list[str]:
        """Builds the command that copies a directory into the home directory of every worker."""
        return self._build_command(
            "tpu-vm", "scp", "--recurse", str(source), f"{self.name}:", "--worker=all", "--quiet"
        )

    def query_state(self) -> ResourceState:
        """Queries the current state of the resource.

        Raises:
            UserError: if gcloud is not installed.
            MachineError: if gcloud fails.
        """
        done = _run(self.describe_command())
        if done.returncode:
            if "NOT_FOUND" in done.stderr:
                return ResourceState("", "")
            raise MachineError(f"`{shlex.join(self.describe_command())}` failed: {_failure_reason(done)}")
        state = json.loads(done.stdout)["state"]
        return ResourceState(
            state["state"], state.get("failedData", {}).get("error", {}).get("message", "no reason given")
        )

    def run_command(self, command: list[str]) -> None:
        """Runs a command. If it fails, raises `UserError` with gcloud's message."""
        done = _run(command)
        if done.returncode:
            raise UserError(f"`{shlex.join(command)}` failed: {_failure_reason(done)}")

    def stream_output(self, command: list[str]) -> Iterator[str]:
        """Yields each output line as it arrives. If the command fails, raises `MachineError` after the last line."""
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
                # A caller that stops reading early must not have to wait for the rest of the output.
                if process.poll() is None:
                    process.stdout.close()
                    process.terminate()
        if process.returncode:
            raise MachineError(f"`{shlex.join(command)}` failed with exit code {process.returncode}")

    def _build_command(self, *parts: str) -> list[str]:
        project = [] if self.project is None else [f"--project={self.project}"]
        return ["gcloud", "compute", "tpus", *parts, f"--zone={self.zone}", *project]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(_NO_GCLOUD) from None


def _failure_reason(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip() or f"exit code {done.returncode}"
