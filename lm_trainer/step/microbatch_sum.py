"""One function computed of every microbatch, and its results summed in an order that no mesh changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from lm_trainer.core.batch import Batch
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.dispatch_threads import programs_at_once
from lm_trainer.parallel.mesh import batch_shards
from lm_trainer.parallel.tree_sum import Shares, TreeSum
from lm_trainer.step.executable import Executable
from lm_trainer.step.gradient import STEP_SCALARS, MicrobatchFn, Sums
from lm_trainer.step.group_sums import add_over_groups, stack_sums, stacked_shapes, sums_on_group
from lm_trainer.step.groups import DeviceGroups, ModelParallelGroup, PlacedBatch
from lm_trainer.step.microbatch_plan import MicrobatchPlan
from lm_trainer.step.model_def import Params
from lm_trainer.step.per_group import PerGroupExecutable
from lm_trainer.step.phases import Phase, StepProgram


class MicrobatchSum:
    """Computes one function of every microbatch in an executable of its own and adds the results by one fixed tree.

    Args:
        function: what to compute of a microbatch.
        devices: where.
        key: folded with the step and the number of the microbatch.
        names: the parameters that the summed tree has; it lies as they do in storage.
    """

    def __init__(self, function: MicrobatchFn, devices: DeviceGroups, key: jax.Array, names: Mapping[str, Any]):
        mesh = devices.sharding.mesh
        self.devices, self._mesh = devices, mesh
        self._function, self._key_data = devices.cut(function, names), jax.random.key_data(key)
        self._layouts = {name: devices.sharding.params[name] for name in names}
        self._executables: dict[int, PerGroupExecutable] = {}
        # The sum takes the memory of its first term.
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        storage = {name: devices.sharding.storage[name] for name in names}
        summed: Any = Sums(NamedSharding(mesh, PartitionSpec()), storage)  # pyright: ignore[reportArgumentType]
        # With one shard there is nothing to add, and what comes out lies where it was.
        alone = (0,) if batch_shards(mesh) == 1 else ()
        self._reduce = jax.jit(self._reduction, static_argnums=1, out_shardings=summed, donate_argnums=alone)

    def compile(self, shapes: Mapping[str, jax.ShapeDtypeStruct], batch: Batch, plan: MicrobatchPlan) -> Executable:
        """Compiles for microbatches of `plan` with rows like those of `batch`, unless that was done before."""
        if plan.rows not in self._executables:
            executable = PerGroupExecutable(_lane(self._function, self._key_data), self.devices.groups, self._on_group)
            executable.compile(shapes, self.devices.sharding.params, plan.rows_like(batch))
            self._executables[plan.rows] = executable
        return self._executables[plan.rows].program

    def _on_group(self, group: ModelParallelGroup) -> Any:
        return sums_on_group(group, self._layouts)

    def ready(self, params: Params) -> list[Params]:
        """All parameters as `__call__` takes them: whole, on each local group."""
        return self.devices.params_on_groups(params)

    def compiled(self, plan: MicrobatchPlan) -> bool:
        """Returns true if microbatches of `plan` need no compilation."""
        return plan.rows in self._executables

    def __call__(self, on_groups: list[Params], batch: PlacedBatch, step: int) -> Sums:
        """The sums over the global batch: scalars on every device, the tree as the state in storage."""
        executable, groups = self._executables[batch.plan.rows], self.devices.groups
        shares = batch.plan.shares(self._mesh)
        sums = [TreeSum[Sums](shares.count, self._add, shares.terms(group.index).start) for group in groups]
        steps = [group.put(np.int32(step)) for group in groups]
        # Group after group for each microbatch, so that all devices have work while the host dispatches.
        for j in range(shares.most):
            for i, microbatches in enumerate(batch.microbatches):
                if j < len(microbatches):
                    sums[i].push(executable(i, on_groups[i], microbatches[j], steps[i], batch.indices[i][j]))
        parts = [[part for _, part in of_group.parts()] for of_group in sums]
        return wait_on_cpu(self._reduce(stack_sums(parts, shares, self._layouts, self._mesh), shares))

    def phases(
        self,
        name: str,
        sums: str,
        shapes: Mapping[str, jax.ShapeDtypeStruct],
        batch: Batch,
        plan: MicrobatchPlan,
        platform: str,
    ) -> Iterator[Phase]:
        """The phases of `__call__`: `name`, once for each microbatch, and `reduction` over the devices.

        Args:
            name: of the program of a microbatch.
            sums: name of the arrays that are summed.
            shapes: of all parameters.
            batch: rows like those of the step.
            plan: of the batch.
            platform: on which the step is to run.
        """
        shares = plan.shares(self._mesh)
        running, held = programs_and_results(shares, self._mesh, platform)
        program = StepProgram(name, lambda: self.compile(shapes, batch, plan), grows=True)
        reduction = StepProgram("reduction", lambda: self._reduction_program(shapes, shares))
        yield Phase(
            name,
            program,
            adds={sums: held * program.outputs},
            leaves={sums: reduction.arguments},
            at_once=running,
            runs=shares.most,
        )
        yield Phase("reduction", reduction, adds={sums: reduction.new}, frees=(sums,), leaves={sums: reduction.outputs})

    def _reduction_program(self, shapes: Mapping[str, jax.ShapeDtypeStruct], shares: Shares) -> Executable:
        """The program that adds over devices, with the scalars that every loss has."""
        stacked = [stacked_shapes(shapes, self._layouts, self._mesh, STEP_SCALARS)] * shares.most_parts
        return Executable.make(self._reduce, stacked, shares)

    def _reduction(self, stacked: list[Sums], shares: Shares) -> Sums:
        return add_over_groups(stacked, shares, self._layouts, self._mesh)


def programs_and_results(shares: Shares, mesh: Mesh | AbstractMesh, platform: str) -> tuple[int, int]:
    """The programs that a device runs at once, and the results of theirs that it holds at once, sums included.

    Args:
        shares: of the devices in what they compute before they add it up.
        mesh: of the devices.
        platform: of the devices.
    """
    shards = batch_shards(mesh)
    running = min(programs_at_once(platform, shards, mesh.size // shards), shares.most)
    # Each program under way beside the first holds a result that no partial sum has yet.
    return running, shares.most_held + running - 1


def _lane(function: MicrobatchFn, key_data: jax.Array) -> Callable[..., Sums]:
    """Returns `function` with the arguments of a `PerGroupExecutable`; the key follows from step and microbatch."""

    # XLA names instructions after these two functions and the arguments, so the names are part of the program's hash,
    # which runs have recorded: by other names the program would look like another one to `lmt verify`.
    def lane(params: Params, batch: Batch, step: jax.Array, lane: jax.Array) -> Sums:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(key_data), step), lane)
        # The leading axis is that of the batch shards once the groups' results are put together.
        return jax.tree.map(lambda x: x[None], Sums(*function(params, batch, key)))

    return lane
