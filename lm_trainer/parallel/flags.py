"""Agreement of the processes of a run on flags, without making the host wait for the step that is being computed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.parallel.cpu_sync import wait_on_cpu


class FlagExchange:
    """Combines the flags of all processes after each step.

    A collective that the host waits for is queued behind the step on every device, so the devices would be idle while
    the host then logs, loads data and dispatches the next step. In a run of several processes, each call therefore
    enqueues the exchange of its flags and returns the flags of the previous call, which the devices have combined by
    the time the host reads them. A run of one process exchanges nothing: its flags are returned at once.
    """

    def __init__(self) -> None:
        self._combined: jax.Array | None = None

    @property
    def is_late(self) -> bool:
        """True if `exchange` returns the flags of the previous call."""
        return jax.process_count() > 1

    def exchange(self, flags: Mapping[str, bool]) -> dict[str, bool]:
        """Returns, by name, whether any process has set each flag.

        All processes must call this after the same step, with the same names in the same order. With several processes,
        the first call returns all flags as not set.
        """
        if not self.is_late:
            return dict(flags)
        previous, self._combined = self._combined, self._enqueue(list(flags.values()))
        combined = [False] * len(flags) if previous is None else np.asarray(previous).tolist()
        return dict(zip(flags, combined, strict=True))

    @cached_property
    def _mesh(self) -> Mesh:
        return Mesh(np.array(jax.devices()), ("devices",))

    @cached_property
    def _combine(self) -> jax.stages.Wrapped:
        return jax.jit(lambda flags: jnp.any(flags, axis=0), out_shardings=NamedSharding(self._mesh, PartitionSpec()))

    def _enqueue(self, flags: list[bool]) -> jax.Array:
        sharding = NamedSharding(self._mesh, PartitionSpec("devices"))
        local = [jax.device_put(np.array([flags]), device) for device in self._mesh.local_devices]
        stacked = jax.make_array_from_single_device_arrays((self._mesh.size, len(flags)), sharding, local)
        return wait_on_cpu(self._combine(stacked))
