"""The state of training: what it consists of, how it is laid out on the mesh, and how it is born there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.core.layout import LeafLayout
from lm_trainer.core.tree import from_named_leaves, named_leaves

Params = dict[str, jax.Array]
"""Dotted name -> array; every place that handles parameters outside a model uses this form."""


class TrainState(NamedTuple):
    """Everything that a step changes."""

    step: int
    """Steps done so far."""
    params: Params
    opt_state: optax.OptState


@dataclass(frozen=True)
class ModelDef:
    """A model without its numbers: what is needed to put parameters back into a module."""

    graphdef: nnx.GraphDef
    abstract: Any
    """Nested dict of `ShapeDtypeStruct`, as `nnx.to_pure_dict` gives it."""
    axes: Mapping[str, tuple[str | None, ...]]
    """Dotted parameter name -> logical axis of each dimension."""
    build: Callable[[], nnx.Module]

    @classmethod
    def trace(cls, build: Callable[[], nnx.Module]) -> ModelDef:
        """Builds the model abstractly: no memory, no device.

        Raises:
            ValueError: when a parameter does not say its `logical_axes`.
        """
        graphdef, state = nnx.split(nnx.eval_shape(build), nnx.Param)
        axes = {}
        for path, variable in nnx.to_flat_state(state):
            name = ".".join(map(str, path))
            axes[name] = tuple(variable.get_metadata().get("logical_axes", ()))
            if len(axes[name]) != len(variable.shape):
                raise ValueError(f"{name}: shape {variable.shape} but logical axes {axes[name]}")
        return cls(graphdef, nnx.to_pure_dict(state), axes, build)

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Dotted name -> shape and dtype of each parameter."""
        return named_leaves(self.abstract)

    def nested(self, params: Mapping[str, Any]) -> Any:
        """The nested dict that `nnx.merge` takes."""
        return from_named_leaves(self.abstract, dict(params))

    def merge(self, params: Mapping[str, Any]) -> Any:
        """The module with these parameters."""
        return nnx.merge(self.graphdef, self.nested(params))

    def init(self) -> Params:
        """Fresh parameters. Call it under `jax.jit`: run eagerly, initialisers differ by an ulp."""
        return named_leaves(nnx.to_pure_dict(nnx.state(self.build(), nnx.Param)))


class StateShardings(NamedTuple):
    """The sharding of every array of a `TrainState` at rest."""

    params: dict[str, NamedSharding]
    opt_state: Any


@dataclass(frozen=True)
class Placement:
    """Where everything lies."""

    mesh: Mesh
    layouts: Mapping[str, LeafLayout]
    """By parameter name."""
    shardings: StateShardings


def place_state(
    abstract_params: Mapping[str, jax.ShapeDtypeStruct],
    tx: optax.GradientTransformation,
    layouts: Mapping[str, LeafLayout],
    mesh: Mesh,
) -> Placement:
    """Moments lie as their parameters do; everything else of the optimizer is replicated."""
    params = {name: NamedSharding(mesh, layouts[name].rest) for name in abstract_params}
    replicated = NamedSharding(mesh, PartitionSpec())
    opt_state = optax.tree_utils.tree_map_params(
        tx,
        lambda _, sharding: sharding,
        jax.eval_shape(tx.init, dict(abstract_params)),
        params,
        transform_non_params=lambda _: replicated,
    )
    return Placement(mesh, layouts, StateShardings(params, opt_state))


def init_state(
    init_params: Callable[[], Params], tx: optax.GradientTransformation, shardings: StateShardings
) -> TrainState:
    """A fresh state, sharded from the first byte: no device ever holds an unsharded copy."""

    def init() -> tuple[Params, optax.OptState]:
        params = init_params()
        return params, tx.init(params)

    params, opt_state = jax.jit(init, out_shardings=tuple(shardings))()
    return TrainState(0, params, opt_state)


def state_from_params(
    params: Mapping[str, np.ndarray], tx: optax.GradientTransformation, shardings: StateShardings
) -> TrainState:
    """A state at step 0 with given parameters and a fresh optimizer."""
    placed = {name: jax.device_put(value, shardings.params[name]) for name, value in params.items()}
    opt_state = jax.jit(tx.init, out_shardings=shardings.opt_state)(placed)
    return TrainState(0, placed, opt_state)


def to_host(params: Params) -> dict[str, np.ndarray]:
    """Copies whole parameters off the devices; all of them must belong to this process."""
    return {name: np.asarray(x) for name, x in params.items()}
