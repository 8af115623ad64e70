"""An update in which each layer of each weight is assigned to one device, which updates it unsharded."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from lm_trainer.core.jax_types import PyTree
from lm_trainer.optim import Optimizer, Param
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.mesh import BATCH_AXES, batch_shards
from lm_trainer.parallel.rehearsal import join_parts, local_devices
from lm_trainer.parallel.sharded_array import replicate, shards_by_device
from lm_trainer.step.dispatch.program import Program, create_programs
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.state_sharding import TrainedShardings
from lm_trainer.step.updates.update import Metrics, make_update

Kind = Literal["row", "rows", "shared"]
"""Relation of an array of the optimizer state to weights: it has one row for each layer, has several rows for each
layer, or is shared by all weights."""


_SMALL = 1 << 20
"""Maximum number of elements of the weights of several layers, or of several weights of one layer, that one program
moves and that another one updates."""

_ROWS = "some weights"
"""Name, in plans, of the weights that a device updates at a time."""

Rows = dict[str, list[jax.Array]]
"""Name of a weight -> the weight, or rows of it, and the arrays of the optimizer state that belong to it."""


@dataclass(frozen=True)
class Weight:
    """One weight of each layer (or a weight outside the layers), with a rule that updates only this weight."""

    name: str
    count: int
    """Number of layers."""
    size: int
    """Number of elements of one layer."""
    layered: bool
    """True if the first axis is the layer axis."""
    tx: optax.GradientTransformationExtraArgs
    structure: Hashable
    """Tree structure of the state of `tx`."""
    paths: tuple[str, ...]
    """Paths, in the state of the full optimizer, of the leaves of the state of `tx`."""
    kinds: tuple[Kind, ...]

    @classmethod
    def from_param(
        cls,
        param: Param,
        dtype: np.dtype,
        optimizer: Optimizer,
        params: Mapping[str, Param],
        full: Mapping[str, jax.ShapeDtypeStruct],
    ) -> Weight | None:
        """Finds the state of one parameter in the state of all parameters. Returns None if it cannot be separated.

        Args:
            param: parameter.
            dtype: dtype of the parameter.
            optimizer: update rule.
            params: all trained parameters.
            full: shapes of the leaves of the full optimizer state, by path.
        """
        layered = param.axes[:1] == ("layers",)
        tx = optimizer.build_one(param.name, params)
        if tx is None:
            return None
        shape = param.shape[1:] if layered else param.shape
        state = jax.eval_shape(tx.init, {param.name: jax.ShapeDtypeStruct(shape, dtype)})
        leaves, structure = jax.tree_util.tree_flatten_with_path(state)
        named = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
        kinds = [_find_kind(param, path, leaf, full.get(path), layered=layered) for path, leaf in named]
        if None in kinds:
            return None
        count = param.shape[0] if layered else 1
        paths, size = tuple(path for path, _ in named), math.prod(shape)
        return cls(param.name, count, size, layered, tx, structure, paths, tuple(kinds))  # pyright: ignore[reportArgumentType]

    @property
    def shared(self) -> list[str]:
        """Paths of the arrays that all weights share."""
        return [path for path, kind in zip(self.paths, self.kinds, strict=True) if kind == "shared"]

    @property
    def own_arrays(self) -> dict[str, Kind]:
        """Paths of the arrays that belong to this weight, with their kinds."""
        return {path: kind for path, kind in zip(self.paths, self.kinds, strict=True) if kind != "shared"}

    def to_rows(self, x: jax.Array, kind: Kind) -> jax.Array:
        """Reshapes an array in storage to [count, ...]."""
        if not self.layered:
            return x[None]
        return x if kind == "row" else x.reshape(self.count, -1, *x.shape[1:])


def _find_kind(
    param: Param, path: str, leaf: jax.ShapeDtypeStruct, full: jax.ShapeDtypeStruct | None, *, layered: bool
) -> Kind | None:
    if full is None:
        return None
    if f"['{param.name}']" not in path:
        return "shared" if full.shape == leaf.shape else None
    if not layered:
        return "row" if full.shape == leaf.shape else None
    if full.shape == (param.shape[0], *leaf.shape):
        return "row"
    several = leaf.ndim > 0 and full.shape == (param.shape[0] * leaf.shape[0], *leaf.shape[1:])
    return "rows" if several else None


class _Group(NamedTuple):
    """Weights with equal numbers of layers whose rows one program moves."""

    weights: Sequence[Weight]
    gather: Program
    scatter: Program
    firsts: Sequence[np.int32]
    """First row of each gather."""


class OwnedUpdate:
    """Update in which each device updates the weights of some layers, in programs that do not depend on the mesh.

    For update rules that compute sums or products over a single weight, but never over several weights. A device holds
    one unsharded weight with its state and gradient at a time, and the devices share the work.

    Args:
        optimizer: update rule.
        weights: all trained weights.
        shardings: shardings of the state.
        paths: paths of the leaves of the optimizer state, in order.
        mesh: device mesh.
    """

    def __init__(
        self, optimizer: Optimizer, weights: Sequence[Weight], shardings: TrainedShardings, paths: list[str], mesh: Mesh
    ):
        self._optimizer, self._weights, self._paths, self._mesh = optimizer, weights, paths, mesh
        self._devices, self._shards = local_devices(mesh), batch_shards(mesh)
        self._structure = jax.tree.structure(shardings.opt_state)
        state = dict(zip(paths, jax.tree.leaves(shardings.opt_state), strict=True))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._dealt = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
        self._groups = [self._make_group(group, shardings, state) for group in _group_weights(weights)]
        self._programs: dict[str, list[Program]] = {}

    def _make_group(
        self, weights: Sequence[Weight], shardings: TrainedShardings, state: Mapping[str, NamedSharding]
    ) -> _Group:
        count, size = weights[0].count, sum(weight.size for weight in weights)
        rounds = -(-count // self._shards)
        # The largest divisor of the number of rounds that keeps what a program moves small.
        at_once = max(n for n in range(1, rounds + 1) if rounds % n == 0 and (n == 1 or n * size <= _SMALL))
        stored = {w.name: [shardings.params[w.name], *(state[path] for path in w.own_arrays)] for w in weights}
        gather = jax.jit(partial(self._rows_of_all, weights, at_once), out_shardings=self._dealt)
        # The state is updated in place.
        scatter = jax.jit(partial(self._with_rows_of_all, weights, stored), out_shardings=stored, donate_argnums=0)
        firsts = [np.int32(n * self._shards) for n in range(0, rounds, at_once)]
        return _Group(
            weights,
            Program("update: gather", gather, _ROWS),
            Program("update: scatter", scatter, "new state"),
            firsts,
        )

    @cached_property
    def _firsts(self) -> list[list[jax.Array]]:
        """First row of each gather of each group. Sent once, because transfers would cost time in every step."""
        return [[replicate(first, self._mesh) for first in group.firsts] for group in self._groups]

    def _kinds(self, weight: Weight) -> list[Kind]:
        """Returns the kinds of the parameter and of its arrays in the optimizer state."""
        return ["row", *weight.own_arrays.values()]

    def _rows_of_all(
        self, weights: Sequence[Weight], rounds: int, arrays: Rows, grads: Params, first: jax.Array
    ) -> list[tuple[Rows, Params]]:
        """Returns, for each round, the next rows of all weights with their states, and of their gradients."""

        def rows_at(start: jax.Array) -> tuple[Rows, Params]:
            rows = {w.name: self._take_rows(w, self._kinds(w), arrays[w.name], start) for w in weights}
            return rows, {w.name: self._take_rows(w, ["row"], [grads[w.name]], start)[0] for w in weights}

        return [rows_at(first + n * self._shards if n else first) for n in range(rounds)]

    def _with_rows_of_all(
        self,
        weights: Sequence[Weight],
        shardings: Mapping[str, Sequence[NamedSharding]],
        arrays: Rows,
        rounds: Sequence[Rows],
        first: jax.Array,
    ) -> Rows:
        for n, rows in enumerate(rounds):
            start = first + n * self._shards if n else first
            arrays = {
                w.name: self._replace_rows(w, shardings[w.name], arrays[w.name], rows[w.name], start) for w in weights
            }
        return arrays

    def _take_rows(
        self, weight: Weight, kinds: Sequence[Kind], arrays: Sequence[jax.Array], first: jax.Array
    ) -> list[jax.Array]:
        """Returns the next rows of arrays: one row for each shard, padded with copies of the last row."""
        stacks = [weight.to_rows(x, kind) for x, kind in zip(arrays, kinds, strict=True)]
        if weight.count % self._shards == 0:
            # A slice copies rows, whereas a gather would visit all elements.
            return [jax.lax.dynamic_slice_in_dim(x, first, self._shards) for x in stacks]
        index = first + jnp.arange(self._shards)
        return [jnp.take(x, index, axis=0, mode="clip") for x in stacks]

    def _replace_rows(
        self,
        weight: Weight,
        shardings: Sequence[NamedSharding],
        arrays: list[jax.Array],
        rows: list[jax.Array],
        first: jax.Array,
    ) -> list[jax.Array]:
        """Replaces the next rows of the arrays. Padding rows are dropped."""
        index = first + jnp.arange(self._shards)
        done = []
        for x, new, kind, stored in zip(arrays, rows, self._kinds(weight), shardings, strict=True):
            if kind == "row":
                if self._shards > self._mesh.shape["data"]:
                    # XLA knows no other way from rows that are distributed over replicas to their storage, and warns
                    # about it.
                    new = jax.lax.with_sharding_constraint(new, self._everywhere)
                # Constrained to storage before the update, so that no device needs the unsharded array.
                spec = PartitionSpec(None, *(stored.spec[1:] if weight.layered else stored.spec))
                new = jax.lax.with_sharding_constraint(new, NamedSharding(self._mesh, spec))
            stack = weight.to_rows(x, kind)
            if weight.count % self._shards == 0:
                stack = jax.lax.dynamic_update_slice_in_dim(stack, new, first, 0)
            else:
                stack = stack.at[index].set(new, mode="drop")
            done.append(stack.reshape(x.shape))
        return done

    def __call__(
        self,
        params: Params,
        opt_state: optax.OptState,
        grads: Params,
        curvature: Params | None,
        scalars: Mapping[str, jax.Array],
    ) -> tuple[Params, PyTree, Metrics]:
        """Computes the update. Consumes parameters and optimizer state."""
        del curvature  # these rules use no curvature
        old = dict(zip(self._paths, jax.tree.leaves(opt_state), strict=True))
        params, state, metrics, all_shared = dict(params), dict(old), None, dict[str, jax.Array]()
        for group, firsts in zip(self._groups, self._firsts, strict=True):
            weights = group.weights
            arrays = {w.name: [params[w.name], *(state[path] for path in w.own_arrays)] for w in weights}
            group_grads = {w.name: grads[w.name] for w in weights}
            shared = {path: old[path] for weight in weights for path in weight.shared}
            for first in firsts:
                rounds = list[Rows]()
                for rows, row_grads in wait_on_cpu(group.gather(arrays, group_grads, first)):
                    new_rows, new_shared, metrics = self._run_update(weights, rows, row_grads, shared, scalars)
                    rounds.append(new_rows)
                    all_shared |= new_shared
                arrays = wait_on_cpu(group.scatter(arrays, rounds, first))
            for weight in weights:
                params[weight.name] = arrays[weight.name][0]
                state |= dict(zip(weight.own_arrays, arrays[weight.name][1:], strict=True))
        assert metrics is not None, "there are weights"
        if self._mesh.size == 1:
            shared_arrays = (all_shared, metrics)
            all_shared, metrics = jax.tree.map(lambda x: join_parts(x.shape, self._everywhere, [x]), shared_arrays)
        state |= all_shared
        return params, jax.tree.unflatten(self._structure, [state[path] for path in self._paths]), metrics

    def _run_update(
        self,
        group: Sequence[Weight],
        rows: Rows,
        grads: Params,
        shared: dict[str, jax.Array],
        scalars: Mapping[str, jax.Array],
    ) -> tuple[Rows, dict[str, jax.Array], Metrics]:
        """Makes each device update its own rows, which are consumed."""
        arguments = (rows, grads, shared, dict(scalars))
        programs = self._compile_group(group, *arguments)

        if self._mesh.size == 1:
            # Dividing and joining arrays would take longer than the update of small weights.
            return programs[0](*arguments)

        def join_results(parts: Sequence[PyTree], sharding: NamedSharding, count: int | None) -> PyTree:
            def join_array(*x: jax.Array) -> jax.Array:
                shape = x[0].shape if count is None else (count, *x[0].shape[1:])
                return join_parts(shape, sharding, x)

            return jax.tree.map(join_array, *parts)

        leaves, structure = jax.tree.flatten(arguments)
        parts = [shards_by_device(x) for x in leaves]
        results = [
            program(*jax.tree.unflatten(structure, [part[device] for part in parts]))
            for program, device in zip(programs, self._devices, strict=True)
        ]
        new, new_shared, metrics = zip(*results, strict=True)
        return (
            join_results(new, self._dealt, self._shards),
            join_results(new_shared, self._everywhere, None),
            join_results(metrics, self._everywhere, None),
        )

    def _jit_group(self, group: Sequence[Weight]) -> jax.stages.Wrapped:
        def of_group(
            rows: Rows, grads: Params, shared: dict[str, jax.Array], scalars: Mapping[str, jax.Array]
        ) -> tuple[Rows, dict[str, jax.Array], Metrics]:
            new, new_shared, metrics = {}, {}, {}
            for weight in group:
                # The barrier separates the weights, so that the bits of a weight do not depend on its group.
                inputs = rows[weight.name], grads[weight.name], shared, dict(scalars)
                new[weight.name], counts, metrics = _update_row(
                    weight, self._optimizer, *jax.lax.optimization_barrier(inputs)
                )
                new_shared |= counts
            return new, new_shared, metrics

        return jax.jit(of_group, donate_argnums=0)

    def _compile_group(self, group: Sequence[Weight], *args: PyTree) -> list[Program]:
        name = group[0].name
        if name not in self._programs:
            jitted = self._jit_group(group)

            def argument_shapes(index: int) -> tuple[PyTree, ...]:
                on = SingleDeviceSharding(self._devices[index])
                return jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype, sharding=on), args
                )

            devices = [[device] for device in self._devices]
            names = name if len(group) == 1 else f"{name} to {group[-1].name}"
            program, computation = Program("update", jitted, _ROWS), f"the update of {names}"
            self._programs[name] = create_programs(program, lambda _: jitted, argument_shapes, devices, computation)
        return self._programs[name]


def _update_row(
    weight: Weight,
    optimizer: Optimizer,
    rows: list[jax.Array],
    grad: jax.Array,
    shared: Mapping[str, jax.Array],
    scalars: Mapping[str, jax.Array],
) -> tuple[list[jax.Array], dict[str, jax.Array], Metrics]:
    """Updates one row of a weight and of its state, and the arrays that weights share."""
    param, *states = (x[0] for x in rows)
    remaining = iter(states)
    leaves = [
        shared[path] if kind == "shared" else next(remaining)
        for path, kind in zip(weight.paths, weight.kinds, strict=True)
    ]

    state = jax.tree.unflatten(weight.structure, leaves)
    update = make_update(optimizer, weight.tx)
    params, state, metrics = update({weight.name: param}, state, {weight.name: grad[0]}, None, scalars)
    new_state = dict(zip(weight.paths, jax.tree.leaves(state), strict=True))
    new = [params[weight.name], *(new_state[path] for path in weight.own_arrays)]
    return [x[None] for x in new], {path: new_state[path] for path in weight.shared}, metrics


def _group_weights(weights: Sequence[Weight]) -> Iterator[list[Weight]]:
    """Groups consecutive weights with equal numbers of layers and a small total size; one program moves a group."""
    group, size = list[Weight](), 0
    for weight in weights:
        if group and (weight.count != group[0].count or size + weight.size > _SMALL):
            yield group
            group, size = [], 0
        group.append(weight)
        size += weight.size
    yield group


def make_owned_update(
    optimizer: Optimizer,
    params: Mapping[str, Param],
    tx: optax.GradientTransformationExtraArgs,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    shardings: TrainedShardings,
    mesh: Mesh,
) -> OwnedUpdate | None:
    """Returns the update that processes weight by weight; None if the rule does not allow it.

    Args:
        optimizer: update rule.
        params: trained parameters.
        tx: transformation built from `optimizer` for all parameters.
        shapes: shapes of the parameters by name.
        shardings: shardings of the state.
        mesh: device mesh.
    """
    leaves = jax.tree_util.tree_flatten_with_path(jax.eval_shape(tx.init, {name: shapes[name] for name in params}))[0]
    full = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    candidates = [
        Weight.from_param(param, shapes[name].dtype, optimizer, params, full) for name, param in params.items()
    ]
    weights = [weight for weight in candidates if weight is not None]
    covered = {path for weight in weights for path in weight.paths}
    # An array of the state that belongs to no weight would not be updated.
    if len(weights) < len(candidates) or covered != set(full):
        return None
    return OwnedUpdate(optimizer, weights, shardings, list(full), mesh)
