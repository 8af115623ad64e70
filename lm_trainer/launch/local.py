"""Launches the processes of a run that belong on this machine."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lm_trainer.core.errors import UserError
from lm_trainer.launch.supervise import End, LocalProcess, find_free_address, supervise

_DEVICE_FLAG = "--xla_force_host_platform_device_count"


@dataclass(frozen=True)
class Nodes:
    """Machines that each launch the same number of processes of one run.

    Raises:
        UserError: if there is no such machine, or several machines have no coordinator or are to restart.
    """

    count: int = 1
    index: int = 0
    """Index of this machine."""
    coordinator: str | None = None
    """Address of a port on the first machine, as `host:port`. None finds a free port on this machine."""
    restarts: int = 0
    """Number of times that the only machine starts the run again, without the processes that were killed and their
    GPUs."""

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise UserError(f"--node {self.index}: the {self.count} nodes have the numbers 0 to {self.count - 1}")
        if self.count > 1 and self.coordinator is None:
            raise UserError("--nodes needs --coordinator HOST:PORT, with a free port of the first node")
        if self.count > 1 and self.restarts:
            raise UserError("--restarts is for one machine, which cannot start processes on the other --nodes again")


def launch_local(
    arguments: Sequence[str],
    count: int,
    *,
    devices_per_process: int | None,
    write: Callable[[str], object],
    nodes: Nodes = Nodes(),
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Starts `count` processes on this machine, and supervises them.

    Args:
        arguments: arguments of the Python interpreter that train the run in one process.
        count: the number of processes.
        devices_per_process: number of CPU devices to emulate in each process. None divides the machine's GPUs among the
            processes, or gives each process one CPU device if there are no GPUs.
        write: receives each line of output.
        nodes: the machines of the run.
        environ: environment variables that the processes inherit.

    Returns:
        The exit code of the last attempt, as returned by `supervise`.

    Raises:
        UserError: if the GPUs cannot be divided equally.
    """
    environments, restarts = process_environments(environ, count, devices_per_process), nodes.restarts
    while True:
        end = _run_processes(arguments, environments, nodes, write)
        left = [environment for index, environment in enumerate(environments) if index not in end.lost]
        if end.interrupted or not end.lost or not left or not restarts:
            return end.code
        write(f"starting again with the {len(left)} of {len(environments)} processes that are left")
        environments, restarts = left, restarts - 1


def _run_processes(
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    nodes: Nodes,
    write: Callable[[str], object],
) -> End:
    count = len(environments)
    address, total, first = nodes.coordinator or find_free_address(), nodes.count * count, nodes.index * count
    processes = [
        LocalProcess(
            [sys.executable, *arguments, *distributed_settings(address, total, first + index)], environment, os.getcwd()
        )
        for index, environment in enumerate(environments)
    ]
    return supervise(processes, write, first_index=first)


def distributed_settings(address: str, count: int | str, index: int | str) -> list[str]:
    """Builds the configuration overrides that let one process find the others.

    Args:
        address: address of the coordinator, as `host:port`.
        count: number of processes.
        index: index of this process. All three arguments may also be placeholders that Kubernetes replaces.

    Returns:
        Overrides of the form `key=value`; an empty list for a single process.
    """
    if count == 1:
        return []
    section = "trainer.distributed"
    return [
        f"{section}.coordinator_address={address}",
        f"{section}.num_processes={count}",
        f"{section}.process_id={index}",
    ]


def process_environments(
    environ: Mapping[str, str], count: int, devices_per_process: int | None, gpus: Sequence[str] | None = None
) -> list[dict[str, str]]:
    """Builds the environment variables of each process.

    Args:
        environ: environment variables that all processes inherit.
        count: the number of processes.
        devices_per_process: as for `launch_local`.
        gpus: names of the GPUs of this machine; None finds them with `visible_gpus`.

    Raises:
        UserError: if the GPUs cannot be divided equally.
    """
    # The output goes to a pipe, and Python block-buffers its output to a pipe by default.
    shared = {**environ, "PYTHONUNBUFFERED": "1"}
    if devices_per_process is not None:
        return [{**shared, **emulation_environ(environ, devices_per_process)} for _ in range(count)]
    gpus = visible_gpus(environ) if gpus is None else gpus
    if count == 1 or not gpus or environ.get("JAX_PLATFORMS") == "cpu":
        return [dict(shared) for _ in range(count)]
    if len(gpus) % count:
        raise UserError(
            f"{count} processes cannot share {len(gpus)} GPUs ({', '.join(gpus)}) equally; choose another number of "
            f"processes, or other GPUs by CUDA_VISIBLE_DEVICES"
        )
    share = len(gpus) // count
    return [{**shared, "CUDA_VISIBLE_DEVICES": ",".join(gpus[i * share : (i + 1) * share])} for i in range(count)]


def emulation_environ(environ: Mapping[str, str], devices: int) -> dict[str, str]:
    """Builds the environment variables that make JAX emulate `devices` devices on a CPU."""
    # A device count that is already in XLA_FLAGS, for example from a test run, would override JAX_NUM_CPU_DEVICES.
    flags = [flag for flag in environ.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICE_FLAG)]
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": " ".join(flags)}


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Lists the names of the NVIDIA GPUs that are visible to child processes.

    The names are read from the device files. Asking JAX would open every GPU in this process, which needs none.
    """
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name not in ("", "-1")]
    numbers = (re.fullmatch(r"nvidia(\d+)", path.name) for path in devices.glob("nvidia*"))
    return [str(number) for number in sorted(int(match[1]) for match in numbers if match)]
