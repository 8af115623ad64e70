"""Exchange of flags and times among the processes of a run, without making the host wait for the current step."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.core.jax_internals import coordination_client
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.processes import gather, gather_texts, is_lead

_EXCHANGE_MS = 24 * 60 * 60 * 1000
"""Time limit, in milliseconds, of a wait for flags of another process, which may be compiling or saving. If a process
dies, `lm_trainer.health.peer_failure` ends the others at once."""


class FlagExchange:
    """Combines the flags of all processes after each step.

    A collective that the host waits for is queued behind the step on every device, so the devices would be idle while
    the host then logs, loads data and dispatches the next step. In a run of several processes, each call therefore
    enqueues the exchange of its flags and returns the flags of the previous call, which the devices have combined by
    the time the host reads them. A run of one process exchanges nothing: its flags are returned at once.

    Attributes:
        seconds: times of each process in the call before, float32 [processes, times]; None before the second call, and
            in a run of one process.
    """

    def __init__(self) -> None:
        self._combined: tuple[jax.Array, jax.Array] | None = None
        self.seconds: np.ndarray | None = None

    @property
    def is_late(self) -> bool:
        """True if `exchange` returns the flags of the previous call."""
        return jax.process_count() > 1

    def exchange(self, flags: Mapping[str, bool], seconds: Sequence[float] = ()) -> dict[str, bool]:
        """Returns, by name, whether any process has set each flag.

        All processes must call this after the same step, with the same names in the same order. With several processes,
        the first call returns all flags as not set.

        Args:
            flags: flags of this process.
            seconds: times of this process, as many in each process. See `seconds` for the times of all processes.
        """
        if not self.is_late:
            return dict(flags)
        previous, self._combined = self._combined, self._enqueue(list(flags.values()), seconds)
        if previous is None:
            return dict.fromkeys(flags, False)
        combined, times = map(np.asarray, previous)
        self.seconds = times[self._first_devices]
        return dict(zip(flags, combined.tolist(), strict=True))

    @cached_property
    def _mesh(self) -> Mesh:
        return Mesh(np.array(jax.devices()), ("devices",))

    @cached_property
    def _first_devices(self) -> list[int]:
        """Position of the first device of each process."""
        processes = [device.process_index for device in self._mesh.devices]
        return [processes.index(process) for process in range(jax.process_count()) if process in processes]

    @cached_property
    def _combine(self) -> jax.stages.Wrapped:
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        return jax.jit(lambda flags, seconds: (jnp.any(flags, axis=0), seconds), out_shardings=everywhere)

    def _enqueue(self, flags: Sequence[bool], seconds: Sequence[float]) -> tuple[jax.Array, jax.Array]:
        rows = np.array([flags]), np.array([seconds], np.float32)
        return wait_on_cpu(self._combine(*map(self._stack, rows)))

    def _stack(self, row: np.ndarray) -> jax.Array:
        """Returns the rows of all processes, once for each of their devices."""
        sharding = NamedSharding(self._mesh, PartitionSpec("devices"))
        local = [jax.device_put(row, device) for device in self._mesh.local_devices]
        return jax.make_array_from_single_device_arrays((self._mesh.size, *row.shape[1:]), sharding, local)


class HostFlags:
    """Combines flags of all processes at once, without their devices.

    `lm_trainer.parallel.processes.gather` runs a program on the devices, which is queued behind the current step, so
    the host would wait for that step. Here process 0 collects the flags through the coordination service of
    `jax.distributed`: a process waits only for the other hosts.
    """

    def __init__(self) -> None:
        self._rounds = 0

    def combine(self, flags: Mapping[str, bool]) -> dict[str, bool]:
        """Returns, by name, whether any process has set each flag.

        All processes must call this at the same point, with the same names in the same order.
        """
        if jax.process_count() == 1:
            return dict(flags)
        client = coordination_client()
        if client is None:
            # Only processes that `jax.distributed` has connected have the service.
            received = gather(np.array([*flags.values()], np.int32)).max(axis=0)
            return dict(zip(flags, map(bool, received.tolist()), strict=True))
        directory, previous = (f"{self._directory}/{number}" for number in (self._rounds, self._rounds - 1))
        self._rounds += 1
        local = "".join(str(int(flag)) for flag in flags.values())
        if is_lead():
            keys = [f"{directory}/{process}" for process in range(1, jax.process_count())]
            by_process = [local, *(client.blocking_key_value_get(key, _EXCHANGE_MS) for key in keys)]
            combined = "".join(map(max, zip(*by_process, strict=True)))
            client.key_value_set(f"{directory}/combined", combined)
            # A process sends its flags after it has read the result of the round before, which is not needed any more.
            client.key_value_delete(f"{previous}/")
        else:
            client.key_value_set(f"{directory}/{jax.process_index()}", local)
            combined = client.blocking_key_value_get(f"{directory}/combined", _EXCHANGE_MS)
        return dict(zip(flags, (flag == "1" for flag in combined), strict=True))

    @cached_property
    def _directory(self) -> str:
        """Directory of this object's keys in the service, which keeps keys as long as the processes live."""
        return f"lm_trainer/flags/{gather_texts(secrets.token_hex(8))[0]}"
