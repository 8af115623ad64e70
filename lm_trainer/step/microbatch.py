"""How a global batch is cut, computed microbatch by microbatch, and summed: bit for bit the same on every mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.dispatch_threads import programs_at_once
from lm_trainer.parallel.mesh import BATCH_AXES, batch_shards
from lm_trainer.parallel.ordered_sum import TreeSum, most_held, sum_over_shards, tree_sum
from lm_trainer.step.executable import (
    Executable,
    ModelParallelGroup,
    PerGroupExecutable,
    local_groups,
    on_group,
    stack_groups,
)
from lm_trainer.step.model_parallel import shard_over_group
from lm_trainer.step.phases import Phase, StepProgram
from lm_trainer.step.state import Params, StateSharding


class Sums(NamedTuple):
    """What microbatches contribute, as sums that add up."""

    scalars: dict[str, jax.Array]
    """float32."""
    tree: Params
    """By parameter name."""


MicrobatchFn = Callable[[Params, Batch, jax.Array], Sums]
"""`function(params, microbatch, key) -> Sums`; the key is the microbatch's own."""


@dataclass(frozen=True)
class MicrobatchPlan:
    """How the rows of a global batch are computed; it never depends on the devices."""

    batch_size: int
    """Rows of the global batch."""
    count: int
    """Microbatches in a step, V."""
    rows: int
    """Rows in a microbatch; those past the end of the batch are padding that counts for nothing."""

    @classmethod
    def make(cls, batch_size: int, rows: int, elastic_shards: int, *, pad: bool = False) -> MicrobatchPlan:
        """Cuts `batch_size` rows into microbatches of `rows`, or, with -1, into `elastic_shards` microbatches.

        Args:
            batch_size: rows of the global batch.
            rows: of a microbatch, or -1.
            elastic_shards: the most devices along the batch axes.
            pad: fill up a batch that cannot be cut so, to a multiple of `elastic_shards` microbatches.

        Raises:
            ValueError: when the batch cannot be cut so, and `pad` is false.
        """
        if pad:
            rows = -(-batch_size // elastic_shards) if rows == -1 else rows
            filled = -(-batch_size // (rows * elastic_shards)) * elastic_shards
            return cls(batch_size, batch_size // rows if batch_size % rows == 0 else filled, rows)
        if rows == -1:
            if batch_size % elastic_shards:
                raise ValueError(
                    f"train_batch_size {batch_size} cannot be cut into elastic_shards={elastic_shards} equal "
                    f"microbatches; make it a multiple, set per_device_parallelism or elastic_shards, or set "
                    f"allow_nondivisible_batch_size"
                )
            rows = batch_size // elastic_shards
        if rows < 1 or batch_size % rows:
            raise ValueError(
                f"train_batch_size {batch_size} is not a multiple of per_device_parallelism={rows}; make it one, or "
                f"set allow_nondivisible_batch_size"
            )
        return cls(batch_size, batch_size // rows, rows)

    def per_shard(self, mesh: Mesh) -> int:
        """Microbatches that each batch shard of the mesh computes in turn.

        Raises:
            UserError: when this mesh cannot share the microbatches equally.
        """
        shards = batch_shards(mesh)
        if self.count % shards == 0 and shards & (shards - 1) == 0:
            return self.count // shards
        largest = self.count & -self.count
        raise UserError(
            f"{shards} devices along the data axes cannot share {self.count} microbatches of {self.rows} rows: the "
            f"number of devices must be a power of two up to {largest}. Use fewer devices, or change "
            f"trainer.train_batch_size, trainer.per_device_parallelism or trainer.elastic_shards "
            f"(which changes the run's numbers)"
        )


@dataclass(frozen=True)
class PlacedBatch:
    """This process's rows of a global batch, on their devices."""

    plan: MicrobatchPlan
    microbatches: list[list[Batch]]
    """For each local group its microbatches, in order."""


class DeviceGroups:
    """Where microbatches are computed, and how rows and parameters get there."""

    def __init__(self, sharding: StateSharding):
        self.sharding = sharding
        self.groups = local_groups(sharding.mesh)
        compute = compute_shardings(sharding)
        self._gather = None if compute is None else jax.jit(lambda p: p, out_shardings=compute)

    def cut(self, function: MicrobatchFn, names: Iterable[str]) -> Callable[..., Any]:
        """`function` as the devices of a group share it; `names` are the parameters that its tree has."""
        return shard_over_group(function, self.groups[0].mesh, self.sharding.params, names)

    def local_rows(self, plan: MicrobatchPlan) -> range:
        """The rows of the global batch that this process needs."""
        rows = plan.per_shard(self.sharding.mesh) * plan.rows
        ends = (self.groups[0].index * rows, (self.groups[-1].index + 1) * rows)
        return range(*(min(end, plan.batch_size) for end in ends))

    def put(self, batch: Batch, plan: MicrobatchPlan) -> PlacedBatch:
        """Cuts this process's rows and sends them to their devices."""
        per_shard = plan.per_shard(self.sharding.mesh)
        batch = pad_rows(batch, per_shard * plan.rows * len(self.groups))
        placed = []
        for i, group in enumerate(self.groups):
            starts = [(i * per_shard + j) * plan.rows for j in range(per_shard)]
            cuts = [Batch(*(x[start : start + plan.rows] for x in batch)) for start in starts]
            placed.append(jax.device_put(cuts, group.sharding()))
        return PlacedBatch(plan, placed)

    def params_on_groups(self, params: Params) -> list[Params]:
        """The parameters as each local group computes with them."""
        whole = wait_on_cpu(self._gather(params)) if self._gather else params
        return [{name: on_group(x, group) for name, x in whole.items()} for group in self.groups]

    def gathering(self, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> StepProgram | None:
        """The program that brings parameters to where they are computed with, None where they rest there."""
        if self._gather is None:
            return None
        storage = self.sharding.storage
        placed = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=storage[n]) for n, x in shapes.items()}
        return StepProgram("gather", partial(Executable.make, self._gather, placed))


def compute_shardings(sharding: StateSharding) -> dict[str, NamedSharding] | None:
    """The shardings of all parameters during computation; None where they rest so, and nothing is gathered."""
    compute = {name: NamedSharding(sharding.mesh, each.compute) for name, each in sharding.params.items()}
    # Axes of a single device cut nothing: there the parameters are where they are needed, and are not copied.
    there = all(_same(compute[name], storage) for name, storage in sharding.storage.items())
    return None if there else compute


def _same(one: NamedSharding, other: NamedSharding) -> bool:
    return one.is_equivalent_to(other, max(len(one.spec), len(other.spec)))


def pad_rows(batch: Batch, rows: int) -> Batch:
    """Fills up with rows that are no part of any document and have no weight."""
    missing = rows - len(batch.tokens)
    if not missing:
        return batch
    fill = Batch(tokens=0, targets=0, weights=0, positions=0, segments=-1)  # pyright: ignore[reportArgumentType]
    return Batch(
        *(
            np.concatenate([x, np.full((missing, *np.shape(x)[1:]), value, x.dtype)])
            for x, value in zip(batch, fill, strict=True)
        )
    )


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
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        storage = {name: devices.sharding.storage[name] for name in names}
        summed: Any = Sums(NamedSharding(mesh, PartitionSpec()), storage)  # pyright: ignore[reportArgumentType]
        # With one shard there is nothing to add, and what comes out lies where it was.
        alone = (0,) if batch_shards(mesh) == 1 else ()
        self._reduce = jax.jit(self._reduction, out_shardings=summed, donate_argnums=alone)

    def compile(
        self, shapes: Mapping[str, jax.ShapeDtypeStruct], batch: Batch, plan: MicrobatchPlan
    ) -> PerGroupExecutable:
        """Compiles for microbatches of `plan` with rows like those of `batch`, unless that was done before."""
        if plan.rows not in self._executables:
            executable = PerGroupExecutable(_lane(self._function, self._key_data), self.devices.groups, self._on_group)
            rows = Batch(*(np.empty((plan.rows, *x.shape[1:]), x.dtype) for x in batch))
            executable.compile(shapes, self.devices.sharding.params, rows)
            self._executables[plan.rows] = executable
        return self._executables[plan.rows]

    def _on_group(self, group: ModelParallelGroup) -> Any:
        """How the sums of a microbatch, with an axis in front, lie on its group: like the parameters there."""
        tree = {name: group.sharding(None, *param_sharding.compute) for name, param_sharding in self._layouts.items()}
        return Sums(group.sharding(), tree)  # pyright: ignore[reportArgumentType]

    def compiled(self, plan: MicrobatchPlan) -> bool:
        """Whether microbatches of `plan` can be computed at once."""
        return plan.rows in self._executables

    def __call__(self, on_groups: list[Params], batch: PlacedBatch, step: int) -> Sums:
        """The sums over the global batch: scalars on every device, the tree as the state in storage."""
        executable, groups = self._executables[batch.plan.rows], self.devices.groups
        per_shard = len(batch.microbatches[0])
        sums = [TreeSum(per_shard, self._add) for _ in groups]
        for j in range(per_shard):
            for i, group in enumerate(groups):
                index = np.int32(group.index * per_shard + j)
                sums[i].push(executable(i, on_groups[i], batch.microbatches[i][j], np.int32(step), index))
        return wait_on_cpu(self._reduce(self._stack([s.result() for s in sums])))

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
        running, held = programs_and_results(plan.per_shard(self._mesh), self._mesh, platform)
        program = StepProgram(name, lambda: self.compile(shapes, batch, plan).program, grows=True)
        reduction = StepProgram("reduction", lambda: self._reduction_program(shapes))
        yield Phase(
            name, program, adds={sums: held * program.outputs}, leaves={sums: reduction.arguments}, at_once=running
        )
        yield Phase("reduction", reduction, adds={sums: reduction.new}, frees=(sums,), leaves={sums: reduction.outputs})

    def _reduction_program(self, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> Executable:
        """The program that adds over devices, with the scalars that every loss has."""

        def stacked(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> Any:
            sharding = NamedSharding(self._mesh, PartitionSpec(BATCH_AXES, *spec))
            return jax.ShapeDtypeStruct((batch_shards(self._mesh), *shape), dtype, sharding=sharding)

        tree = {
            n: stacked(shapes[n].shape, shapes[n].dtype, param_sharding.compute)
            for n, param_sharding in self._layouts.items()
        }
        scalars = {name: stacked((), np.float32, PartitionSpec()) for name in ("loss", "weight")}
        return Executable.make(self._reduce, Sums(scalars, tree))

    def _stack(self, parts: list[Sums]) -> Sums:
        whole = PartitionSpec()
        return Sums(
            {name: stack_groups([p.scalars[name] for p in parts], whole, self._mesh) for name in parts[0].scalars},
            {
                name: stack_groups([p.tree[name] for p in parts], param_sharding.compute, self._mesh)
                for name, param_sharding in self._layouts.items()
            },
        )

    def _reduction(self, stacked: Sums) -> Sums:
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        return Sums(
            {name: tree_sum(jax.lax.with_sharding_constraint(x, everywhere)) for name, x in stacked.scalars.items()},
            sum_over_shards(stacked.tree, self._layouts, self._mesh),
        )


def programs_and_results(per_shard: int, mesh: Mesh | AbstractMesh, platform: str) -> tuple[int, int]:
    """The programs that a device runs at once, and the results of theirs that it holds at once, sums included.

    Args:
        per_shard: microbatches that a device computes.
        mesh: of the devices.
        platform: of the devices.
    """
    shards = batch_shards(mesh)
    running = min(programs_at_once(platform, shards, mesh.size // shards), per_shard)
    # Each program under way beside the first holds a result that no partial sum has yet.
    return running, most_held(per_shard) + running - 1


def _lane(function: MicrobatchFn, key_data: jax.Array) -> Callable[..., Sums]:
    """Returns `function` with the arguments of a `PerGroupExecutable`; the key follows from step and microbatch."""

    # XLA names instructions after these two functions and the arguments, so the names are part of the program's hash,
    # which runs have recorded: by other names the program would look like another one to `lmt verify`.
    def lane(params: Params, batch: Batch, step: jax.Array, lane: jax.Array) -> Sums:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(key_data), step), lane)
        # The leading axis is that of the batch shards once the groups' results are put together.
        return jax.tree.map(lambda x: x[None], Sums(*function(params, batch, key)))

    return lane
