"""An update in which every weight of every layer belongs to one device, which computes it whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from lm_trainer.optim import Optimizer, Param
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.mesh import BATCH_AXES, batch_shards
from lm_trainer.parallel.rehearsal import join_parts, local_devices
from lm_trainer.parallel.sharded_array import by_device, replicate
from lm_trainer.step.dispatch.program import Program, on_each
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.state_sharding import TrainedShardings
from lm_trainer.step.updates.update import Metrics, make_update

Kind = Literal["row", "rows", "shared"]
"""An array of the optimizer's state: one row for each layer, several rows for each, or the same for all weights."""


_SMALL = 1 << 20
"""Numbers of weights of one layer that one program moves and another one updates."""

_ROWS = "some weights"
"""The name that a plan has for the weights that a device updates at a time."""

Rows = dict[str, list[jax.Array]]
"""By the name of a weight: the weight, or rows of it, and its own arrays of the optimizer's state."""


@dataclass(frozen=True)
class Weight:
    """One weight of each layer, or one weight that no other layer has, and the rule that updates it alone."""

    name: str
    count: int
    """Layers."""
    size: int
    """Numbers of one layer."""
    layered: bool
    """True where the first axis counts them."""
    tx: optax.GradientTransformationExtraArgs
    structure: Any
    """Tree structure of the state of `tx`."""
    paths: tuple[str, ...]
    """The leaves of that state, by their places in the state of the whole optimizer."""
    kinds: tuple[Kind, ...]

    @classmethod
    def of(
        cls, param: Param, dtype: Any, optimizer: Optimizer, params: Mapping[str, Param], whole: Mapping[str, Any]
    ) -> Weight | None:
        """Finds the state of one parameter in that of all; None where it is no part of it that can be taken out.

        Args:
            param: the parameter.
            dtype: its dtype.
            optimizer: the rule.
            params: all that are trained.
            whole: shapes of the leaves of the optimizer's state, by their paths.
        """
        layered = param.axes[:1] == ("layers",)
        tx = optimizer.build_one(param.name, params)
        if tx is None:
            return None
        shape = param.shape[1:] if layered else param.shape
        state = jax.eval_shape(tx.init, {param.name: jax.ShapeDtypeStruct(shape, dtype)})
        leaves, structure = jax.tree_util.tree_flatten_with_path(state)
        named = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
        kinds = [_kind(param, path, leaf, whole.get(path), layered=layered) for path, leaf in named]
        if None in kinds:
            return None
        count = param.shape[0] if layered else 1
        paths, size = tuple(path for path, _ in named), math.prod(shape)
        return cls(param.name, count, size, layered, tx, structure, paths, tuple(kinds))  # pyright: ignore[reportArgumentType]

    @property
    def shared(self) -> list[str]:
        """The paths of the arrays that all weights have in common."""
        return [path for path, kind in zip(self.paths, self.kinds, strict=True) if kind == "shared"]

    @property
    def own(self) -> dict[str, Kind]:
        """The paths of the weight's own arrays, with their kinds."""
        return {path: kind for path, kind in zip(self.paths, self.kinds, strict=True) if kind != "shared"}

    def rows(self, x: jax.Array, kind: Kind) -> jax.Array:
        """[count, ...] from an array as it is stored."""
        if not self.layered:
            return x[None]
        return x if kind == "row" else x.reshape(self.count, -1, *x.shape[1:])


def _kind(param: Param, path: str, leaf: Any, whole: Any, *, layered: bool) -> Kind | None:
    if whole is None:
        return None
    if f"['{param.name}']" not in path:
        return "shared" if whole.shape == leaf.shape else None
    if not layered:
        return "row" if whole.shape == leaf.shape else None
    if whole.shape == (param.shape[0], *leaf.shape):
        return "row"
    several = leaf.ndim > 0 and whole.shape == (param.shape[0] * leaf.shape[0], *leaf.shape[1:])
    return "rows" if several else None


class OwnedUpdate:
    """Each device updates the weights of some layers, one after the other, in programs that know nothing of the mesh.

    For update rules that compute sums or products over a weight, and nothing over several: a device holds one weight
    with its state and gradient whole, and all devices share the work.

    Args:
        optimizer: the rule.
        weights: all that are trained.
        shardings: of the state.
        paths: places of the leaves of the optimizer's state, in their order.
        mesh: the device mesh.
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
        self._groups = [*_groups(weights)]
        self._gather, self._scatter = [], []
        for group in self._groups:
            lies = {w.name: [shardings.params[w.name], *(state[path] for path in w.own)] for w in group}
            gather = jax.jit(partial(self._rows_of_all, group), out_shardings=self._dealt)
            self._gather.append(Program("update: gather", gather, _ROWS))
            # The state is changed where it lies.
            scatter = jax.jit(partial(self._with_rows_of_all, group, lies), out_shardings=lies, donate_argnums=0)
            self._scatter.append(Program("update: scatter", scatter, "new state"))
        self._programs: dict[str, list[Program]] = {}

    @cached_property
    def _firsts(self) -> list[jax.Array]:
        turns = range(-(-max(weight.count for weight in self._weights) // self._shards))
        return [replicate(np.int32(turn * self._shards), self._mesh) for turn in turns]

    def _kinds(self, weight: Weight) -> list[Kind]:
        """Those of the parameter and of its own arrays of the state."""
        return ["row", *weight.own.values()]

    def _rows_of_all(
        self, group: Sequence[Weight], arrays: Rows, grads: Params, first: jax.Array
    ) -> tuple[Rows, Params]:
        rows = {w.name: self._rows_of(w, self._kinds(w), arrays[w.name], first) for w in group}
        return rows, {w.name: self._rows_of(w, ["row"], [grads[w.name]], first)[0] for w in group}

    def _with_rows_of_all(
        self,
        group: Sequence[Weight],
        lies: Mapping[str, Sequence[NamedSharding]],
        arrays: Rows,
        rows: Rows,
        first: jax.Array,
    ) -> Rows:
        return {w.name: self._with_rows(w, lies[w.name], arrays[w.name], rows[w.name], first) for w in group}

    def _rows_of(
        self, weight: Weight, kinds: Sequence[Kind], arrays: Sequence[jax.Array], first: jax.Array
    ) -> list[jax.Array]:
        """The next rows of arrays: one for each shard, the last one again where none is left."""
        stacks = [weight.rows(x, kind) for x, kind in zip(arrays, kinds, strict=True)]
        if weight.count % self._shards == 0:
            # A copy, where a gather goes through all numbers.
            return [jax.lax.dynamic_slice_in_dim(x, first, self._shards) for x in stacks]
        index = first + jnp.arange(self._shards)
        return [jnp.take(x, index, axis=0, mode="clip") for x in stacks]

    def _with_rows(
        self, weight: Weight, lies: Sequence[NamedSharding], arrays: list[jax.Array], rows: list[jax.Array], first: Any
    ) -> list[jax.Array]:
        """The arrays with their next rows replaced; those that there are not are dropped."""
        index = first + jnp.arange(self._shards)
        done = []
        for x, new, kind, lie in zip(arrays, rows, self._kinds(weight), lies, strict=True):
            if kind == "row":
                if self._shards > self._mesh.shape["data"]:
                    # XLA knows no other way from rows dealt over replicas to what they store, and warns of it.
                    new = jax.lax.with_sharding_constraint(new, self._everywhere)
                # As they are stored before they are put there, so that no device needs the array whole.
                spec = PartitionSpec(None, *(lie.spec[1:] if weight.layered else lie.spec))
                new = jax.lax.with_sharding_constraint(new, NamedSharding(self._mesh, spec))
            stack = weight.rows(x, kind)
            if weight.count % self._shards == 0:
                stack = jax.lax.dynamic_update_slice_in_dim(stack, new, first, 0)
            else:
                stack = stack.at[index].set(new, mode="drop")
            done.append(stack.reshape(x.shape))
        return done

    def __call__(
        self, params: Params, opt_state: Any, grads: Params, curvature: Any, scalars: Mapping[str, jax.Array]
    ) -> tuple[Params, Any, Metrics]:
        """Consumes parameters and optimizer state."""
        del curvature  # these rules take none
        old = dict(zip(self._paths, jax.tree.leaves(opt_state), strict=True))
        params, state, metrics = dict(params), dict(old), None
        for group, gather, scatter in zip(self._groups, self._gather, self._scatter, strict=True):
            arrays = {w.name: [params[w.name], *(state[path] for path in w.own)] for w in group}
            own_grads = {w.name: grads[w.name] for w in group}
            for first in self._firsts[: -(-group[0].count // self._shards)]:
                shared = {path: old[path] for weight in group for path in weight.shared}
                rows, row_grads = wait_on_cpu(gather(arrays, own_grads, first))
                rows, after, metrics = self._run(group, rows, row_grads, shared, scalars)
                state |= after
                arrays = wait_on_cpu(scatter(arrays, rows, first))
            for weight in group:
                params[weight.name] = arrays[weight.name][0]
                state |= dict(zip(weight.own, arrays[weight.name][1:], strict=True))
        assert metrics is not None, "there are weights"
        return params, jax.tree.unflatten(self._structure, [state[path] for path in self._paths]), metrics

    def _run(
        self,
        group: Sequence[Weight],
        rows: Rows,
        grads: Params,
        shared: dict[str, jax.Array],
        scalars: Mapping[str, jax.Array],
    ) -> tuple[Rows, dict[str, jax.Array], Metrics]:
        """Each device's own rows, which are consumed, updated by that device."""
        arguments = (rows, grads, shared, dict(scalars))
        programs = self._compiled(group, *arguments)
        leaves, structure = jax.tree.flatten(arguments)
        parts = [by_device(x) for x in leaves]
        results = [
            program(*jax.tree.unflatten(structure, [part[device] for part in parts]))
            for program, device in zip(programs, self._devices, strict=True)
        ]

        def joined(parts: Sequence[Any], sharding: NamedSharding, count: int | None) -> Any:
            def one(*x: jax.Array) -> jax.Array:
                shape = x[0].shape if count is None else (count, *x[0].shape[1:])
                return join_parts(shape, sharding, x)

            return jax.tree.map(one, *parts)

        new, after, metrics = zip(*results, strict=True)
        return (
            joined(new, self._dealt, self._shards),
            joined(after, self._everywhere, None),
            joined(metrics, self._everywhere, None),
        )

    def _jitted(self, group: Sequence[Weight]) -> Any:
        def of_group(
            rows: Rows, grads: Params, shared: dict[str, jax.Array], scalars: Mapping[str, jax.Array]
        ) -> tuple[Rows, dict[str, jax.Array], Metrics]:
            new, after, metrics = {}, {}, {}
            for weight in group:
                # Nothing is computed for two weights at once: the bits of one do not depend on its group.
                own = rows[weight.name], grads[weight.name], shared, dict(scalars)
                new[weight.name], counts, metrics = _updated(
                    weight, self._optimizer, *jax.lax.optimization_barrier(own)
                )
                after |= counts
            return new, after, metrics

        return jax.jit(of_group, donate_argnums=0)

    def _compiled(self, group: Sequence[Weight], *args: Any) -> list[Program]:
        name = group[0].name
        if name not in self._programs:
            jitted = self._jitted(group)

            def arguments(index: int) -> Any:
                on = SingleDeviceSharding(self._devices[index])
                local: Any = lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype, sharding=on)  # noqa: E731
                return jax.tree.map(local, args)

            devices = [[device] for device in self._devices]
            names = name if len(group) == 1 else f"{name} to {group[-1].name}"
            program, what = Program("update", jitted, _ROWS), f"the update of {names}"
            self._programs[name] = on_each(program, lambda _: jitted, arguments, devices, what)
        return self._programs[name]


def _updated(
    weight: Weight,
    optimizer: Optimizer,
    rows: list[jax.Array],
    grad: jax.Array,
    shared: Mapping[str, jax.Array],
    scalars: Mapping[str, jax.Array],
) -> tuple[list[jax.Array], dict[str, jax.Array], Metrics]:
    """One row of a weight and its state, updated, and the arrays that it shares with others."""
    param, *own = (x[0] for x in rows)
    ours = iter(own)
    leaves = [
        shared[path] if kind == "shared" else next(ours) for path, kind in zip(weight.paths, weight.kinds, strict=True)
    ]
    state = jax.tree.unflatten(weight.structure, leaves)
    update = make_update(optimizer, weight.tx)
    params, state, metrics = update({weight.name: param}, state, {weight.name: grad[0]}, None, scalars)
    after = dict(zip(weight.paths, jax.tree.leaves(state), strict=True))
    new = [params[weight.name], *(after[path] for path in weight.own)]
    return [x[None] for x in new], {path: after[path] for path in weight.shared}, metrics


def _groups(weights: Sequence[Weight]) -> Iterator[list[Weight]]:
    """Groups of neighbours that have as many layers and are small together, which one program moves."""
    group, size = list[Weight](), 0
    for weight in weights:
        if group and (weight.count != group[0].count or size + weight.size > _SMALL):
            yield group
            group, size = [], 0
        group.append(weight)
        size += weight.size
    yield group


def owned_update(
    optimizer: Optimizer,
    params: Mapping[str, Param],
    tx: optax.GradientTransformationExtraArgs,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    shardings: TrainedShardings,
    mesh: Mesh,
) -> OwnedUpdate | None:
    """The update weight by weight; None where the rule cannot be computed so.

    Args:
        optimizer: the rule.
        params: those that are trained.
        tx: built from `optimizer` for all of them.
        shapes: by name.
        shardings: of the state.
        mesh: the device mesh.
    """
    leaves = jax.tree_util.tree_flatten_with_path(jax.eval_shape(tx.init, {name: shapes[name] for name in params}))[0]
    whole = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    found = [Weight.of(param, shapes[name].dtype, optimizer, params, whole) for name, param in params.items()]
    weights = [weight for weight in found if weight is not None]
    covered = {path for weight in weights for path in weight.paths}
    # An array of the state that belongs to no weight would not be updated.
    if len(weights) < len(found) or covered != set(whole):
        return None
    return OwnedUpdate(optimizer, weights, shardings, list(whole), mesh)
