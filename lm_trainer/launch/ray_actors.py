"""Launches the processes of a run as actors on an existing Ray cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.ray_cluster import join_cluster
from lm_trainer.launch.local import distributed_settings, emulation_environ
from lm_trainer.launch.supervise import LocalProcess, Status, find_free_address, supervise

_LOST = -9
"""Exit code reported for a process whose actor died, because the process was killed with the actor (SIGKILL)."""


@dataclass(frozen=True)
class RayJob:
    """Settings of a run on a Ray cluster."""

    processes: int
    address: str
    """Address of the cluster, such as `auto` or `ray://host:10001`."""
    cpus_per_process: float = 1
    gpus_per_process: float = 0
    devices_per_process: int | None = None
    """Number of CPU devices to emulate in each process; None emulates none."""
    wait: float = 300
    """Maximum time in seconds to wait for free resources in the cluster."""


def launch_on_ray(arguments: Sequence[str], job: RayJob, write: Callable[[str], object]) -> int:
    """Starts the processes of a run, one per actor, and supervises them.

    lm_trainer must be installed on every node, and the configuration, the data and the directories of the run must have
    the same paths on every node.

    Args:
        arguments: arguments of the Python interpreter that train the run in one process.
        job: settings of the run.
        write: receives each line of output.

    Returns:
        The exit code, as returned by `supervise`.

    Raises:
        UserError: if Ray is not installed, the cluster does not exist, or its resources do not become free in time.
    """
    ray = _connect_to_ray(job.address)
    try:
        group = _reserve_resources(ray, job)
        # Ray must not restart an actor, because all processes of a run have to start together.
        options = {"num_cpus": job.cpus_per_process, "num_gpus": job.gpus_per_process, "max_restarts": 0}
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        actors = [
            ray.remote(_Worker)
            .options(**options, scheduling_strategy=strategy(group, placement_group_bundle_index=index))
            .remote()
            for index in range(job.processes)
        ]
        # The coordinator listens on the node of process 0, so only an actor on that node can find a free port.
        address = ray.get(actors[0].address.remote())
        extra = {} if job.devices_per_process is None else emulation_environ({}, job.devices_per_process)
        for index, actor in enumerate(actors):
            command = [*arguments, *distributed_settings(address, job.processes, index)]
            ray.get(actor.start.remote(command, extra, os.getcwd()))
        return supervise([_RemoteProcess(ray, actor) for actor in actors], write).code
    except ray.exceptions.RayError as error:
        raise MachineError(f"the Ray cluster failed: {error}") from None
    finally:
        ray.shutdown()


def _connect_to_ray(address: str) -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies  # `ray.util` only has this attribute after the import
    except ImportError:
        raise UserError("`lmt launch ray` needs Ray; run: pip install ray") from None
    advice = "Start one (`ray start --head`), or give the address of one that runs with --address"
    join_cluster(ray, address, advice)
    return ray


def _reserve_resources(ray: Any, job: RayJob) -> Any:
    """Reserves resources for all processes together: if only some started, they would wait forever for the others."""
    need = {"CPU": job.cpus_per_process, "GPU": job.gpus_per_process}
    bundle = {name: amount for name, amount in need.items() if amount}
    group = ray.util.placement_group([bundle] * job.processes, strategy="PACK")
    try:
        ray.get(group.ready(), timeout=job.wait)
    except ray.exceptions.GetTimeoutError:
        has = {name: amount for name, amount in ray.cluster_resources().items() if name in need}
        raise UserError(
            f"the Ray cluster had no room for {job.processes} processes with {bundle} each within {job.wait:g} s; "
            f"altogether it has {has}"
        ) from None
    return group


class _Worker:
    """Actor that runs one process on its node."""

    def address(self) -> str:
        import ray

        return find_free_address(ray.util.get_node_ip_address())

    def start(self, command: Sequence[str], extra: Mapping[str, str], directory: str) -> None:
        environ = {**os.environ, **extra, "PYTHONUNBUFFERED": "1"}
        self._process = LocalProcess([sys.executable, *command], environ, directory)

    def location(self) -> str:
        import ray

        return f"host {ray.util.get_node_ip_address()}, {self._process.location}"

    def poll(self) -> Status:
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)


class _RemoteProcess:
    """`SupervisedProcess` that forwards to a `_Worker`, usually on another node."""

    def __init__(self, ray: Any, actor: Any):
        self._ray, self._actor = ray, actor
        self.location = ray.get(actor.location.remote())

    def poll(self) -> Status:
        try:
            return Status(*self._ray.get(self._actor.poll.remote()))
        except self._ray.exceptions.RayActorError:
            return Status([], _LOST)

    def send_signal(self, number: int) -> None:
        try:
            self._ray.get(self._actor.send_signal.remote(number))
        except self._ray.exceptions.RayActorError:
            return
