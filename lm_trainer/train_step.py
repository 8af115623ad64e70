"""One optimizer step, bit for bit the same on every mesh.

The global batch is cut into a fixed number of microbatches of fixed size. Each is computed by a hermetic lane; their
gradients are added by one fixed binary tree, first inside a device, then across devices; the update is elementwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.core.mesh import batch_shards
from lm_trainer.core.reduction import TreeSum, sum_of_squares, sum_over_shards, tree_sum
from lm_trainer.lanes import Lanes, local_groups, on_group, stack_groups
from lm_trainer.train_state import ModelDef, Params, Placement, TrainState

LossFn = Callable[[Any, Batch, jax.Array | None], tuple[jax.Array, jax.Array]]
"""`loss(model, batch, key) -> (sum of the weighted losses, sum of the weights)`, float32 scalars; key for dropout."""


class Sums(NamedTuple):
    """What microbatches contribute, as sums that add up; every array has a leading axis of 1."""

    loss: jax.Array
    weight: jax.Array
    grads: Params


@dataclass(frozen=True)
class MicrobatchPlan:
    """How the rows of a global batch are computed; it never depends on the devices."""

    count: int
    """Microbatches in a step, V."""
    rows: int
    """Rows in a microbatch."""

    @classmethod
    def make(cls, batch_size: int, rows: int, elastic_shards: int) -> MicrobatchPlan:
        """Cuts `batch_size` rows into microbatches of `rows`, or, with -1, into `elastic_shards` microbatches.

        Raises:
            ValueError: when the batch cannot be cut so.
        """
        if rows == -1:
            if batch_size % elastic_shards:
                raise ValueError(
                    f"train_batch_size {batch_size} cannot be cut into elastic_shards={elastic_shards} equal "
                    f"microbatches; make it a multiple, or set per_device_parallelism or elastic_shards"
                )
            rows = batch_size // elastic_shards
        if rows < 1 or batch_size % rows:
            raise ValueError(f"train_batch_size {batch_size} is not a multiple of per_device_parallelism={rows}")
        return cls(batch_size // rows, rows)

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


class TrainStep:
    """Callable `(state, batch, learning_rate) -> (state, metrics)`; consumes the state that it is given.

    `metrics` are float32 scalars on the device (`loss`, `grad_norm`, `tokens`): reading them waits for the step.
    A step whose loss or gradient is not finite leaves parameters and optimizer as they were.
    """

    def __init__(
        self,
        model: ModelDef,
        loss: LossFn,
        tx: optax.GradientTransformationExtraArgs,
        *,
        placement: Placement,
        plan: MicrobatchPlan,
        key: jax.Array,
    ):
        mesh, layouts, shardings = placement.mesh, placement.layouts, placement.shardings
        self.plan = plan
        self.lanes = Lanes(_lane(model, loss, jax.random.key_data(key)), local_groups(mesh))
        self._mesh, self.layouts = mesh, layouts
        self._per_shard = plan.per_shard(mesh)
        self._shapes = model.shapes
        compute = {name: NamedSharding(mesh, layout.compute) for name, layout in layouts.items()}
        self._gather = None if compute == shardings.params else jax.jit(lambda p: p, out_shardings=compute)
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        replicated = NamedSharding(mesh, PartitionSpec())
        self._reduce = jax.jit(
            lambda sums: (
                _sum_scalars(sums.loss, mesh),
                _sum_scalars(sums.weight, mesh),
                sum_over_shards(sums.grads, layouts, mesh),
            ),
            out_shardings=(replicated, replicated, shardings.params),
        )
        self._norm = jax.jit(lambda grads: sum_of_squares(grads, layouts, mesh), out_shardings=replicated)
        self._update = jax.jit(make_update(tx), out_shardings=(*shardings, replicated), donate_argnums=(0, 1))

    def compile(self, batch: Batch) -> None:
        """Compiles the lane for rows like those of `batch` (any number of rows)."""
        rows = Batch(*(np.empty((self.plan.rows, *x.shape[1:]), x.dtype) for x in batch))
        self.lanes.compile(self._shapes, self.layouts, rows)

    @property
    def compiled(self) -> bool:
        """Whether `compile` has been called."""
        return self.lanes.compiled

    @property
    def local_rows(self) -> range:
        """The rows of the global batch that this process needs."""
        groups = self.lanes.groups
        rows = self._per_shard * self.plan.rows
        return range(groups[0].index * rows, (groups[-1].index + 1) * rows)

    def put(self, batch: Batch) -> list[list[Batch]]:
        """This process's rows on their devices: for each local group, its microbatches in order."""
        placed = []
        for i, group in enumerate(self.lanes.groups):
            sharding = group.sharding()
            start = i * self._per_shard * self.plan.rows
            cuts = [
                Batch(*(x[start + j * self.plan.rows : start + (j + 1) * self.plan.rows] for x in batch))
                for j in range(self._per_shard)
            ]
            placed.append(jax.device_put(cuts, sharding))
        return placed

    def params_on_groups(self, params: Params) -> list[Params]:
        """The parameters as each local group computes with them."""
        whole = self._gather(params) if self._gather else params
        return [{name: on_group(x, group) for name, x in whole.items()} for group in self.lanes.groups]

    def gradient(self, state: TrainState, batch: list[list[Batch]]) -> tuple[jax.Array, jax.Array, Params]:
        """The sums of loss, weights and gradients over the global batch; the gradients lie as the state at rest."""
        groups = self.lanes.groups
        on_groups = self.params_on_groups(state.params)
        sums = [TreeSum(self._per_shard, self._add) for _ in groups]
        step = np.int32(state.step)
        for j in range(self._per_shard):
            for i, group in enumerate(groups):
                lane = np.int32(group.index * self._per_shard + j)
                sums[i].push(self.lanes(i, on_groups[i], batch[i][j], step, lane))
        return self._reduce(self._stack([s.result() for s in sums]))

    def _stack(self, parts: list[Sums]) -> Sums:
        whole = PartitionSpec()
        return Sums(
            stack_groups([p.loss for p in parts], whole, self._mesh),
            stack_groups([p.weight for p in parts], whole, self._mesh),
            {
                name: stack_groups([p.grads[name] for p in parts], layout.compute, self._mesh)
                for name, layout in self.layouts.items()
            },
        )

    def __call__(
        self, state: TrainState, batch: list[list[Batch]], learning_rate: float
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step on a batch placed by `put`."""
        loss, weight, grads = self.gradient(state, batch)
        squares = self._norm(grads)
        scalars = (loss, weight, squares, np.float32(learning_rate))
        params, opt_state, metrics = self._update(state.params, state.opt_state, grads, *scalars)
        return TrainState(state.step + 1, params, opt_state), metrics


def _lane(model: ModelDef, loss: LossFn, key_data: jax.Array) -> Callable[..., Sums]:
    def lane(params: Params, batch: Batch, step: jax.Array, lane: jax.Array) -> Sums:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(key_data), step), lane)

        def objective(params: Params) -> tuple[jax.Array, jax.Array]:
            return loss(model.merge(params), batch, key)

        (total, weight), grads = jax.value_and_grad(objective, has_aux=True)(params)
        return Sums(total[None], weight[None], jax.tree.map(lambda g: g[None], grads))

    return lane


def _sum_scalars(x: jax.Array, mesh: Mesh) -> jax.Array:
    """[batch shards] -> scalar, by the fixed tree, on every device."""
    return tree_sum(jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec())))


def make_update(tx: optax.GradientTransformationExtraArgs) -> Callable[..., tuple[Params, Any, dict[str, jax.Array]]]:
    """The last piece of a step, as a function to be compiled: from summed gradients to new parameters.

    Its arguments are parameters, optimizer state, summed gradients, and the float32 scalars loss sum, weight sum, sum
    of squares of the gradients, and learning rate.
    """

    def update(
        params: Params, opt_state: Any, grads: Params, *scalars: jax.Array
    ) -> tuple[Params, Any, dict[str, jax.Array]]:
        loss, weight, squares, learning_rate = scalars
        grad_norm = jnp.sqrt(squares) / weight
        mean_loss = loss / weight
        mean_grads = jax.tree.map(lambda g: g / weight.astype(g.dtype), grads)
        updates, new_opt_state = tx.update(
            mean_grads, opt_state, params, learning_rate=learning_rate, grad_norm=grad_norm, loss=mean_loss
        )
        finite = jnp.isfinite(mean_loss) & jnp.isfinite(grad_norm)
        keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
        new_params = jax.tree.map(keep, optax.apply_updates(params, updates), params)
        metrics = {"loss": mean_loss, "grad_norm": grad_norm, "tokens": weight}
        return new_params, jax.tree.map(keep, new_opt_state, opt_state), metrics

    return update
