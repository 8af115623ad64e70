"""The computation of one microbatch as an executable of its own.

Inside one big program XLA rewrites the same computation differently for one device than for many, so its bits change
with the mesh. The computation of a microbatch is compiled alone, for one batch shard's devices, to the same optimised
program on every mesh; the hash of that program is recorded with the run.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.parallel.compile_per_device import compile_on_each
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.dispatch_threads import DispatchThreads, programs_at_once
from lm_trainer.parallel.mesh import BATCH_AXES, MESH_AXES, MODEL_PARALLEL_AXES, batch_shards
from lm_trainer.parallel.sharding import ParamSharding

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelParallelGroup:
    """The devices that compute one microbatch together: those along the axes that are not batch axes."""

    index: int
    """Position among all batch shards of the mesh."""
    mesh: Mesh
    """The same axes as the whole mesh, with the batch axes of size 1."""

    def sharding(self, *spec: Any) -> NamedSharding:
        """A sharding over this group's devices."""
        return NamedSharding(self.mesh, PartitionSpec(*spec))


def local_groups(mesh: Mesh) -> list[ModelParallelGroup]:
    """The batch shards whose devices belong to this process, in the order of the batch.

    Raises:
        UserError: when devices of several processes would compute one microbatch.
    """
    rows = mesh.devices.reshape(batch_shards(mesh), -1)
    if any(len({device.process_index for device in devices}) > 1 for devices in rows):
        sizes = " x ".join(
            f"{a}_axis_size={mesh.shape[a]}" for a in (*MODEL_PARALLEL_AXES, "model") if mesh.shape[a] > 1
        )
        raise UserError(
            f"{sizes} needs {rows.shape[1]} devices of one process; make it smaller, or start fewer processes"
        )
    groups = []
    for index, devices in enumerate(rows):
        if devices[0].process_index == jax.process_index():
            grid = devices.reshape((1,) * len(BATCH_AXES) + mesh.devices.shape[len(BATCH_AXES) :])
            groups.append(ModelParallelGroup(index, Mesh(grid, MESH_AXES, axis_types=mesh.axis_types)))
    return groups


@dataclass(frozen=True)
class Executable:
    """A compiled program, and what it was made of."""

    traced: jax.stages.Traced
    compiled: jax.stages.Compiled

    @classmethod
    def make(cls, jitted: Any, *args: Any) -> Executable:
        """Compiles for arguments like these, which may be shapes."""
        traced = jitted.trace(*args)
        return cls(traced, traced.lower().compile())

    def fingerprint(self) -> str:
        """A hash of the optimised program, without what names source lines."""
        return program_hash(self.compiled)

    def jaxpr(self) -> str:
        """What was traced, as JAX prints it."""
        return str(self.traced.jaxpr)

    def hlo(self) -> str:
        """The optimised program, as XLA prints it."""
        return self.compiled.as_text() or ""

    def memory(self) -> Any:
        """XLA's memory analysis, None where the backend has none."""
        return self.compiled.memory_analysis()


class PerGroupExecutable:
    """One function, compiled once for every group of this process.

    Args:
        function: `function(params, batch, step, index)` with a Batch of one microbatch; `step` and
            `index` are int32 scalars.
        groups: where to compile it.
        results: how what it returns lies on a group; XLA's choice without.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        groups: Sequence[ModelParallelGroup],
        results: Callable[[ModelParallelGroup], Any] | None = None,
    ):
        self._function, self._results = function, results
        self.groups = groups
        devices = groups[0].mesh.devices
        self._streams = DispatchThreads(programs_at_once(devices.flat[0].platform, len(groups), devices.size))
        self._compiled: list[Executable] = []

    def compile(
        self, params: Mapping[str, jax.ShapeDtypeStruct], param_shardings: Mapping[str, ParamSharding], batch: Batch
    ) -> None:
        """Compiles for all groups at once, for parameters in their `compute` sharding and a microbatch like `batch`."""
        traced: list[jax.stages.Traced] = []

        def one(index: int) -> jax.stages.Compiled:
            group = self.groups[index]
            whole = group.sharding()
            placed = {
                name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=group.sharding(*param_shardings[name].compute))
                for name, x in params.items()
            }
            rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), batch)
            scalar = jax.ShapeDtypeStruct((), np.int32, sharding=whole)
            results = None if self._results is None or group.mesh.size == 1 else self._results(group)
            executable = Executable.make(jax.jit(self._function, out_shardings=results), placed, rows, scalar, scalar)
            traced.append(executable.traced)
            return executable.compiled

        programs = compile_on_each(one, [list(group.mesh.devices.flat) for group in self.groups])
        self._compiled = [Executable(traced[0], program) for program in programs]
        if len({executable.fingerprint() for executable in self._compiled}) > 1:
            logger.warning("the devices run different programs for one computation: bits may depend on their number")

    @property
    def compiled(self) -> bool:
        """Whether `compile` has been called."""
        return bool(self._compiled)

    @property
    def program(self) -> Executable:
        """What the first group runs; the others run the same."""
        return self._compiled[0]

    def __call__(self, group: int, *args: Any) -> Any:
        """Enqueues the function on the `group`-th local group and returns at once, where programs may wait in line."""
        return wait_on_cpu(self._streams(self._compiled[group].compiled, *args))


def program_hash(compiled: jax.stages.Compiled) -> str:
    """SHA-256 (16 hex digits) over the instructions of a compiled program; equal programs compute equal bits."""
    text = compiled.as_text() or ""
    first = re.search(r"^(%|ENTRY)", text, re.MULTILINE)
    body = re.sub(r",? metadata=\{[^}]*\}", "", text[first.start() if first else 0 :])
    # On a CPU: into how many tasks an element-wise loop is cut, by the threads of the process that compiled it.
    body = re.sub(r'"outer_dimension_partitions":\[[^\]]*\],?', "", body)
    return hashlib.sha256(body.encode()).hexdigest()[:16]


def on_group(array: jax.Array, group: ModelParallelGroup) -> jax.Array:
    """The part of a global array that lies on a group, as an array of that group.

    `array` must not be cut over the batch axes; its data are not copied.
    """
    spec = array.sharding.spec  # pyright: ignore[reportAttributeAccessIssue]
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    return jax.make_array_from_single_device_arrays(
        array.shape, group.sharding(*spec), [shards[device] for device in group.mesh.devices.flat]
    )


def stack_groups(parts: Sequence[jax.Array], spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    """One array [1, ...] from each local group becomes the global array [batch shards, ...], without a copy.

    Args:
        parts: in the order of the local groups.
        spec: how the remaining dimensions are cut.
        mesh: the whole mesh.
    """
    shape = (batch_shards(mesh), *parts[0].shape[1:])
    shards = [shard.data for part in parts for shard in part.addressable_shards]
    return jax.make_array_from_single_device_arrays(
        shape, NamedSharding(mesh, PartitionSpec(BATCH_AXES, *spec)), shards
    )
