"""State of training: its arrays, their layout on the mesh, and its initialisation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from lm_trainer.core.jax_types import PyTree
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.sharded_array import gather_to_host
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.state_sharding import StateSharding

_COMPUTED_REPLICATED = 1 << 20
"""Maximum number of elements of an array whose initial values are computed in full on every device."""


class TrainState(NamedTuple):
    """Arrays that a step changes."""

    step: int
    """Number of steps done so far."""
    params: Params
    """Trained parameters."""
    opt_state: optax.OptState
    averaged: Params | None = None
    """Average of the parameters over training; None if the run has none."""
    frozen: Params = {}
    """Frozen parameters, which are not saved in checkpoints."""


def abstract_state(
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    tx: optax.GradientTransformation,
    sharding: StateSharding,
    *,
    averaged: bool = False,
) -> TrainState:
    """Returns a state of shapes with shardings, which takes no memory; `shapes` are the shapes of all parameters."""

    def with_sharding(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params: PyTree = {name: with_sharding(x, sharding.storage[name]) for name, x in shapes.items()}
    trained = {name: params.pop(name) for name in sharding.trained.params}
    opt_state = jax.tree.map(with_sharding, jax.eval_shape(tx.init, trained), sharding.trained.opt_state)
    return TrainState(0, trained, opt_state, dict(trained) if averaged else None, params)


def fresh_state(
    init: Callable[[], Params], tx: optax.GradientTransformation, sharding: StateSharding, *, averaged: bool = False
) -> TrainState:
    """Creates a sharded state at step 0; no device ever holds an unsharded copy.

    Args:
        init: function that creates all parameters, such as `ModelDef.init`.
        tx: optimizer.
        sharding: shardings of the state, which determine the trained parameters.
        averaged: True if the state has an average of the parameters.
    """
    return state_from_params(fresh_params(init, sharding), tx, sharding, averaged=averaged)


def fresh_params(init: Callable[[], Params], sharding: StateSharding) -> Params:
    """Creates some or all parameters with `init`, in storage sharding."""
    shapes = jax.eval_shape(init)
    storage = {name: sharding.storage[name] for name in shapes}
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    small = {name for name, x in shapes.items() if x.size <= _COMPUTED_REPLICATED}

    def create(names: Collection[str], shardings: Mapping[str, NamedSharding]) -> Params:
        return jax.jit(lambda: {n: x for n, x in init().items() if n in names}, out_shardings=dict(shardings))()

    # If the size of a shard is not a multiple of a CPU's vectors, it is computed by other instructions than the full
    # array, and they round differently (XLA of jax 0.12). Shards of large arrays are such multiples, and large arrays
    # are never computed in full. A second program shards the small arrays, because in one program XLA would compute
    # only the shards.
    full = create(small, dict.fromkeys(small, everywhere))
    shard = jax.jit(lambda x: x, out_shardings={name: storage[name] for name in small})
    sharded = wait_on_cpu(shard(wait_on_cpu(full)))
    return {**create(shapes.keys() - small, {n: x for n, x in storage.items() if n not in small}), **sharded}


def state_from_params(
    params: Mapping[str, np.ndarray | jax.Array],
    tx: optax.GradientTransformation,
    sharding: StateSharding,
    *,
    averaged: bool = False,
) -> TrainState:
    """Makes a state at step 0 from values of all parameters and a fresh optimizer; arguments as for `fresh_state`."""
    shardings = sharding.trained
    placed = {name: jax.device_put(params[name], storage) for name, storage in sharding.storage.items()}
    trained = {name: placed.pop(name) for name in shardings.params}
    # Under jit with shardings, so that no device ever holds the unsharded state.
    opt_state = jax.jit(tx.init, out_shardings=shardings.opt_state)(trained)
    return TrainState(0, trained, opt_state, copy_params(trained) if averaged else None, placed)


def copy_params(params: Params) -> Params:
    """Copies the parameters to new memory."""
    return jax.jit(lambda p: jax.tree.map(jnp.copy, p))(params)


def to_host(params: Params, *, keep: bool = True) -> dict[str, np.ndarray]:
    """Copies unsharded parameters to the host. All processes must call it.

    Processes with `keep=False` take part in the communication and get an empty dict.
    """
    # One at a time, so that only a part of one parameter is gathered on the devices while it is copied.
    arrays = ((name, np.asarray(x) if x.is_fully_addressable else gather_to_host(x)) for name, x in params.items())
    return {name: x for name, x in arrays if keep}
