"""Several processes as one run: `jax.distributed`, started by hand or by what a cluster says of itself."""

from __future__ import annotations

import os
from typing import Any

from pydantic import NonNegativeInt, PositiveInt, model_validator

from lm_trainer.core.config import Config
from lm_trainer.core.errors import UserError


class DistributedConfig(Config):
    """Which processes make up the run. SLURM and TPU pods are recognised, so that nothing need be set there."""

    coordinator_address: str | None = None
    """`host:port` that process 0 listens on; null: what the cluster says."""
    num_processes: PositiveInt | None = None
    """How many processes the run has; null: what the cluster says, else one."""
    process_id: NonNegativeInt | None = None
    """Which of them this is, from 0; null: what the cluster says. Differs between processes, so it is given on the
    command line: `--trainer.distributed.process_id 1`."""
    local_device_ids: NonNegativeInt | tuple[NonNegativeInt, ...] | None = None
    """The devices of this machine that this process uses; null: those in CUDA_VISIBLE_DEVICES, else all."""
    initialize_jax_distributed: bool = True
    """Whether to connect the processes; false: this process is a run of its own."""

    @model_validator(mode="after")
    def _complete(self) -> DistributedConfig:
        given = [self.coordinator_address, self.num_processes, self.process_id]
        if any(x is not None for x in given) and None in given:
            raise ValueError("coordinator_address, num_processes and process_id belong together; set all of them")
        if self.process_id is not None and self.num_processes is not None and self.process_id >= self.num_processes:
            raise ValueError(f"process_id {self.process_id} is not below num_processes {self.num_processes}")
        return self

    def start(self) -> None:
        """Connects this process to the others, before any device is touched; does nothing in a run of one process.

        Raises:
            UserError: when the others cannot be reached, or this is a run of one process on named devices.
        """
        if not self.initialize_jax_distributed:
            return
        if not (self.num_processes or _in_cluster()):
            if self.local_device_ids is not None:
                raise UserError(
                    "trainer.distributed.local_device_ids chooses the devices of one of several processes, but this "
                    "run has one process; set CUDA_VISIBLE_DEVICES in the environment instead"
                )
            return
        import jax

        if jax.distributed.is_initialized():
            return
        given: dict[str, Any] = {
            "coordinator_address": self.coordinator_address,
            "num_processes": self.num_processes,
            "process_id": self.process_id,
            "local_device_ids": self.local_device_ids,
        }
        try:
            jax.distributed.initialize(**given)
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"trainer.distributed: the processes of the run could not be connected ({reason}); check that all "
                f"num_processes were started and can reach {self.coordinator_address or 'the coordinator'}"
            ) from error


def _in_cluster() -> bool:
    """Whether the environment says that this is one of several processes."""
    slurm = int(os.environ.get("SLURM_NTASKS") or 1) > 1 and "SLURM_PROCID" in os.environ
    tpu_pod = "," in os.environ.get("TPU_WORKER_HOSTNAMES", "") or "MEGASCALE_COORDINATOR_ADDRESS" in os.environ
    return slurm or tpu_pod
