"""Start-up of a multi-process run with `jax.distributed`, from settings or detected from a cluster's environment."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import NonNegativeInt, PositiveInt, model_validator

from lm_trainer.core.config import Config
from lm_trainer.core.errors import UserError
from lm_trainer.parallel.connect import connect_processes


class DistributedConfig(Config):
    """Processes of the run. SLURM, Open MPI and TPU pods are detected, so they need no settings."""

    coordinator_address: str | None = None
    """Address `host:port` on which process 0 listens; null: detected from the cluster."""
    num_processes: PositiveInt | None = None
    """Number of processes of the run; null: detected from the cluster, or one if there is no cluster."""
    process_id: NonNegativeInt | None = None
    """Index of this process, counted from 0; null: detected from the cluster. It differs between processes, so set it
    on the command line: `--trainer.distributed.process_id 1`."""
    local_device_ids: NonNegativeInt | tuple[NonNegativeInt, ...] | None = None
    """Devices of this machine that this process uses; null: the devices in CUDA_VISIBLE_DEVICES, or all if it is not
    set."""
    initialize_jax_distributed: bool = True
    """Connect the processes of the run; false: each process is a separate run."""

    @model_validator(mode="after")
    def _complete(self) -> DistributedConfig:
        settings = [self.coordinator_address, self.num_processes, self.process_id]
        if any(x is not None for x in settings) and None in settings:
            raise ValueError("coordinator_address, num_processes and process_id belong together; set all of them")
        if self.process_id is not None and self.num_processes is not None and self.process_id >= self.num_processes:
            raise ValueError(f"process_id {self.process_id} is not below num_processes {self.num_processes}")
        return self

    def start(self, waiting: Callable[[str], object] = lambda _: None) -> str | None:
        """Connects this process to the others, before any device is used. Does nothing in a single-process run.

        Args:
            waiting: called with a message if connecting takes long.

        Returns:
            Description of the processes for the user; None if there is nothing to report.

        Raises:
            UserError: if the other processes are unreachable, or devices are named in a single-process run.
        """
        if not self.initialize_jax_distributed:
            return None
        cluster = None if self.num_processes else find_cluster(os.environ)
        if not self.num_processes and (cluster is None or not cluster.several):
            if self.local_device_ids is not None:
                raise UserError(
                    "trainer.distributed.local_device_ids chooses the devices of one of several processes, but this "
                    "run has one process; set CUDA_VISIBLE_DEVICES in the environment instead"
                )
            return None if cluster is None else cluster.description
        # Imported here so that reading a configuration does not wait for JAX.
        import jax

        if jax.distributed.is_initialized():
            return None
        # JAX detects the settings that are None here from the same environment.
        address, device_ids = (None, None) if cluster is None else (cluster.coordinator, cluster.local_device_ids)
        arguments: dict[str, object] = {
            "coordinator_address": self.coordinator_address or address,
            "num_processes": self.num_processes,
            "process_id": self.process_id,
            "local_device_ids": device_ids if self.local_device_ids is None else self.local_device_ids,
        }
        try:
            connect_processes(arguments, waiting)
        except (RuntimeError, ValueError, OSError) as error:
            # The first line describes the error; the following lines refer to source code.
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            # A TPU machine that is not part of a pod asks the metadata server too, and learns that it has no
            # neighbours.
            if cluster is not None and cluster.uncertain:
                return f"{cluster.description} names no other processes ({reason}): a run of one process"
            raise UserError(
                f"trainer.distributed: the processes of the run could not be connected ({reason}); check that all "
                f"num_processes were started and can reach {arguments['coordinator_address'] or 'the coordinator'}"
            ) from error
        source = "trainer.distributed says" if cluster is None else f"{cluster.description} says"
        if jax.process_count() == 1:
            return None
        return f"{jax.process_count()} processes, as {source}; this is process {jax.process_index()}"


class Cluster(NamedTuple):
    """Processes of a run, as detected from the environment."""

    description: str
    several: bool
    """True if this process is one of several; if false, the description gives the reason."""
    local_device_ids: tuple[int, ...] | None = None
    """Devices of this process among its visible devices; None: JAX chooses."""
    uncertain: bool = False
    """True if this process may turn out to be the only one."""
    coordinator: str | None = None
    """Address `host:port` of process 0, for messages; None: JAX finds it."""


# The variables that JAX reads; without all of them, JAX would not detect the cluster either.
_SLURM_STEP = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_PORTS = 1 << 12
"""The highest ports, which operating systems never assign to clients; JAX uses one of them too."""
_TPU_FILES = ("/dev/accel0", "/dev/vfio/0")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_OPEN_MPI = ("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE")


def find_cluster(environ: Mapping[str, str]) -> Cluster | None:
    """Detects the cluster that JAX will detect in the environment, and this process's share of the GPUs of its node.

    Returns:
        The cluster; None if nothing suggests that there are other processes.

    Raises:
        UserError: if the processes of a node cannot share its GPUs equally.
    """
    if _read_count(environ, "SLURM_NTASKS", 1) > 1:
        return _slurm_cluster(environ)
    if all(name in environ for name in _OPEN_MPI) and _read_count(environ, "OMPI_COMM_WORLD_SIZE", 1) > 1:
        return Cluster("Open MPI", True)
    hosts = environ.get("TPU_PROCESS_ADDRESSES", environ.get("TPU_WORKER_HOSTNAMES", ""))
    if "," in hosts or "MEGASCALE_COORDINATOR_ADDRESS" in environ:
        return Cluster("the TPU pod", True)
    if not hosts and _needs_metadata_server(environ):
        return Cluster("the TPU's metadata server", True, uncertain=True)
    return None


def _read_count(environ: Mapping[str, str], name: str, default: int) -> int:
    """Returns the number in an environment variable. Raises `UserError` if it is none."""
    text = environ.get(name) or str(default)
    if not text.isdecimal():
        raise _environment_error(name, text)
    return int(text)


def _environment_error(name: str, text: str) -> UserError:
    return UserError(f"{name} in the environment is {text!r}, which is no number of SLURM or MPI; unset or correct it")


def _needs_metadata_server(environ: Mapping[str, str]) -> bool:
    """Returns true on a TPU machine whose neighbours are known only to Google Cloud's metadata server."""
    if "TPU_SKIP_MDS_QUERY" in environ or environ.get("JAX_PLATFORMS", "tpu").split(",")[0] != "tpu":
        return False
    return importlib.util.find_spec("libtpu") is not None and any(Path(file).exists() for file in _TPU_FILES)


def _slurm_cluster(environ: Mapping[str, str]) -> Cluster:
    job = f"SLURM job {environ.get('SLURM_JOB_ID', '?')}"
    # A batch script sees the number of tasks too, but is not one of them.
    if not all(name in environ for name in _SLURM_STEP):
        count = environ["SLURM_NTASKS"]
        return Cluster(f"{job} has {count} tasks, but this process was not started by srun: a run of its own", False)
    return Cluster(job, True, _slurm_devices(environ), coordinator=_slurm_coordinator(environ))


def _slurm_coordinator(environ: Mapping[str, str]) -> str:
    """Returns the address of process 0: the first node of the step, and a port that all processes compute.

    The port is the one JAX uses, except for later steps of a job, which may run on the same node at the same time.
    """
    if "JAX_COORDINATOR_ADDRESS" in environ:
        return environ["JAX_COORDINATOR_ADDRESS"]
    number = _read_count(environ, "SLURM_JOB_ID", 0) + 61 * _read_count(environ, "SLURM_STEP_ID", 0)
    port = environ.get("JAX_COORDINATOR_PORT") or number % _PORTS + (1 << 16) - _PORTS
    return f"{first_host(environ['SLURM_STEP_NODELIST'])}:{port}"


def first_host(nodes: str) -> str:
    """Returns the first host of a SLURM list: `gpu03` of `gpu[03-04,07],cpu1`, `r1n5` of `r[1-2]n[5,8]`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None, "the expression matches the empty text too"
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def _slurm_devices(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Returns the visible GPUs that this task uses, an equal share of its node's GPUs; JAX's default is one."""
    visible = [device for device in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    if not visible:
        return None
    tasks = _tasks_on_node(environ)
    if any(name in environ for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")) or tasks is None:
        # SLURM has bound these GPUs to this task; the other tasks see other GPUs.
        return tuple(range(len(visible)))
    if len(visible) % tasks:
        raise UserError(
            f"{tasks} processes on this node cannot share its {len(visible)} GPUs equally; ask SLURM for another "
            f"--ntasks-per-node, or set trainer.distributed.local_device_ids"
        )
    share, local = len(visible) // tasks, _read_count(environ, "SLURM_LOCALID", 0)
    return tuple(range(local * share, (local + 1) * share))


def _tasks_on_node(environ: Mapping[str, str]) -> int | None:
    """Returns the number of tasks of this step on this node, from a list such as `4(x2),2`; None if not set."""
    counts: list[int] = []
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    for part in filter(None, text.split(",")):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise _environment_error("SLURM_STEP_TASKS_PER_NODE", text)
        counts += [int(match[1])] * int(match[2] or 1)
    node = _read_count(environ, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else None
