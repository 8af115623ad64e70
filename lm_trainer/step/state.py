"""The state of training: what it consists of, how it is laid out on the mesh, and how it is born there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.core.errors import UserError
from lm_trainer.core.tree import from_named_leaves, named_leaves
from lm_trainer.parallel.sharding import ParamSharding

Params = dict[str, jax.Array]
"""Dotted name -> array; every place that handles parameters outside a model uses this form."""


LoadFn = Callable[[Mapping[str, jax.ShapeDtypeStruct], Mapping[str, NamedSharding]], Params]
"""From the shapes and shardings of all parameters to those that it has values for."""


class TrainState(NamedTuple):
    """Everything that a step changes."""

    step: int
    """Steps done so far."""
    params: Params
    """Those that are trained."""
    opt_state: optax.OptState
    averaged: Params | None = None
    """The average of the parameters over training; None when the run keeps none."""
    frozen: Params = {}
    """Parameters that are not trained; they are in no checkpoint."""


@dataclass(frozen=True)
class ModelDef:
    """A model without its numbers: what is needed to put parameters back into a module."""

    graphdef: nnx.GraphDef
    abstract: Any
    """Nested dict of `ShapeDtypeStruct`, as `nnx.to_pure_dict` gives it."""
    axes: Mapping[str, tuple[str | None, ...]]
    """Dotted parameter name -> logical axis of each dimension; None for one that is never cut."""
    build: Callable[[], nnx.Module]
    trainable: frozenset[str]
    """The parameters that are trained; the others stay as they are."""
    load: LoadFn | None = None
    """Reads the values to start from straight to where they lie; None: `build` makes them."""

    @classmethod
    def trace(cls, build: Callable[[], nnx.Module], is_trainable: Callable[[str], bool] = lambda _: True) -> ModelDef:
        """Builds the model abstractly: no memory, no device.

        Args:
            build: makes the model.
            is_trainable: by the dotted name of a parameter.

        Raises:
            UserError: when no parameter is trained, or one has logical axes that do not fit its shape.
        """
        graphdef, state = nnx.split(nnx.eval_shape(build), nnx.Param)
        axes = {}
        for path, variable in nnx.to_flat_state(state):
            name = ".".join(map(str, path))
            whole = (None,) * len(variable.shape)
            axes[name] = tuple(variable.get_metadata().get("logical_axes", whole))
            if len(axes[name]) != len(whole):
                raise UserError(f"{name}: shape {variable.shape} but logical_axes {axes[name]}")
        trainable = frozenset(filter(is_trainable, axes))
        if not trainable:
            raise UserError("no parameter of the model is trained: is_trainable is false for every name")
        return cls(graphdef, nnx.to_pure_dict(state), axes, build, trainable)

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Dotted name -> shape and dtype of each parameter."""
        return named_leaves(self.abstract)

    def nested(self, params: Mapping[str, Any]) -> Any:
        """The nested dict that `nnx.merge` takes."""
        return from_named_leaves(self.abstract, dict(params))

    def named(self, nested: Any) -> dict[str, Any]:
        """The inverse of `nested`."""
        return named_leaves(nested)

    def merge(self, params: Mapping[str, Any]) -> Any:
        """The module with these parameters."""
        return nnx.merge(self.graphdef, self.nested(params))

    def init(self) -> Params:
        """Fresh parameters, all of them. Call it under `jax.jit`: run eagerly, initialisers differ by an ulp."""
        return named_leaves(nnx.to_pure_dict(nnx.state(self.build(), nnx.Param)))


class TrainedShardings(NamedTuple):
    """The sharding of every array of a `TrainState` in storage."""

    params: dict[str, NamedSharding]
    opt_state: Any


@dataclass(frozen=True)
class StateSharding:
    """Shardings of everything that a step reads and writes."""

    mesh: Mesh
    params: Mapping[str, ParamSharding]
    """By parameter name."""
    trained: TrainedShardings
    """Of what is trained."""
    storage: Mapping[str, NamedSharding]
    """Of every parameter in storage, whether it is trained or not."""


def plan_state_sharding(
    trainable: Mapping[str, jax.ShapeDtypeStruct],
    tx: optax.GradientTransformation,
    param_shardings: Mapping[str, ParamSharding],
    mesh: Mesh,
) -> StateSharding:
    """Moments lie as their parameters do; everything else of the optimizer is replicated.

    Args:
        trainable: the parameters that the optimizer updates.
        tx: the optimizer.
        param_shardings: of all parameters.
        mesh: the device mesh.
    """
    storage = {name: NamedSharding(mesh, param_sharding.storage) for name, param_sharding in param_shardings.items()}
    replicated = NamedSharding(mesh, PartitionSpec())
    params = {name: storage[name] for name in trainable}
    abstract = jax.eval_shape(tx.init, dict(trainable))

    def place(leaf: Any, param: Any, sharding: NamedSharding) -> Any:
        if isinstance(leaf, optax.MaskedNode):
            return leaf
        # A statistic of a parameter (a row mean, a factor) may stand in its place: it is small, and lies everywhere.
        return sharding if leaf.shape == param.shape else replicated

    opt_state = optax.tree_utils.tree_map_params(
        tx,
        place,
        abstract,
        dict(trainable),
        params,
        transform_non_params=lambda _: replicated,
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
    )
    return StateSharding(mesh, param_shardings, TrainedShardings(params, opt_state), storage)


def abstract_state(
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    tx: optax.GradientTransformation,
    sharding: StateSharding,
    *,
    averaged: bool = False,
) -> TrainState:
    """A state of shapes with their shardings, without memory; `shapes` are of all parameters."""

    def placed(x: Any, sharding: NamedSharding) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params: Any = {name: placed(x, sharding.storage[name]) for name, x in shapes.items()}
    trained = {name: params.pop(name) for name in sharding.trained.params}
    opt_state = jax.tree.map(placed, jax.eval_shape(tx.init, trained), sharding.trained.opt_state)
    return TrainState(0, trained, opt_state, dict(trained) if averaged else None, params)


def fresh_state(
    init: Callable[[], Params], tx: optax.GradientTransformation, sharding: StateSharding, *, averaged: bool = False
) -> TrainState:
    """A state at step 0, sharded from the first byte: no device ever holds an unsharded copy.

    Args:
        init: all parameters, as `ModelDef.init`.
        tx: the optimizer.
        sharding: where everything lies; it says what is trained.
        averaged: whether the state has an average of the parameters.
    """
    storage = sharding.storage
    return state_from_params(jax.jit(init, out_shardings=dict(storage))(), tx, sharding, averaged=averaged)


def state_from_params(
    params: Mapping[str, np.ndarray | jax.Array],
    tx: optax.GradientTransformation,
    sharding: StateSharding,
    *,
    averaged: bool = False,
) -> TrainState:
    """A state at step 0 with given parameters (all of them) and a fresh optimizer; arguments as for `fresh_state`."""
    shardings = sharding.trained
    placed = {name: jax.device_put(params[name], lies) for name, lies in sharding.storage.items()}
    trained = {name: placed.pop(name) for name in shardings.params}
    opt_state = jax.jit(tx.init, out_shardings=shardings.opt_state)(trained)
    return TrainState(0, trained, opt_state, copied(trained) if averaged else None, placed)


def copied(params: Params) -> Params:
    """The same values in memory of their own."""
    return jax.jit(lambda p: jax.tree.map(jnp.copy, p))(params)


def to_host(params: Params, *, keep: bool = True) -> dict[str, np.ndarray]:
    """Copies whole parameters off the devices; of several processes, all must call it.

    Those that do not `keep` them take part and get nothing.
    """
    whole = ((name, x if x.is_fully_addressable else _whole(x)) for name, x in params.items())
    return {name: np.asarray(x) for name, x in whole if keep}


def _whole(x: jax.Array) -> jax.Array:
    mesh: Any = x.sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]
    return jax.jit(lambda a: a, out_shardings=NamedSharding(mesh, PartitionSpec()))(x).addressable_data(0)
