"""A compiled program for other devices than it was compiled for."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jaxlib import xla_client


def relocate(compiled: jax.stages.Compiled, devices: Sequence[Any], to: Sequence[Any]) -> jax.stages.Compiled:
    """The same machine code, loaded for other devices of this process: a small part of the time of compiling it.

    Args:
        compiled: for `devices`.
        devices: those of its mesh, in order.
        to: as many, in the same order.
    """
    content, inputs, outputs = serialize_executable.serialize(compiled)
    executable, info, no_kwargs = _Loader(content, devices, to).load()
    return jax.stages.Compiled(executable.load(), [], inputs.unflatten(info), outputs, no_kwargs=no_kwargs)


class _Loader(serialize_executable._JaxPjrtUnpickler):
    """JAX's own loader, which finds devices by their number, with other devices under those numbers."""

    def __init__(self, content: bytes, devices: Sequence[Any], to: Sequence[Any]):
        super().__init__(io.BytesIO(content), to[0].client, list(to))
        self.devices_by_id = {before.id: after for before, after in zip(devices, to, strict=True)}
        self._options = xla_client.CompileOptions()
        self._options.num_replicas, self._options.num_partitions = 1, len(to)
        self._options.device_assignment = xla_client.DeviceAssignment.create(np.array([[d.id for d in to]]))

    def persistent_load(self, pid: tuple[Any, ...]) -> Any:
        if pid[0] == "exec":
            return self.backend.deserialize_executable(pid[1], self.execution_devices, self._options)
        return super().persistent_load(pid)
