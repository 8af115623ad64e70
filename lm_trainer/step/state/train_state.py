"""The state of training: what it consists of, how it is laid out on the mesh, and how it is born there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.sharded_array import gather_to_host
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.state_sharding import StateSharding

_COMPUTED_WHOLE = 1 << 20
"""Elements of an array up to which every device computes all of its initial values."""


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
    return state_from_params(fresh_params(init, sharding), tx, sharding, averaged=averaged)


def fresh_params(init: Callable[[], Params], sharding: StateSharding) -> Params:
    """The values that `init` makes of some or all parameters, where they are stored."""
    shapes = jax.eval_shape(init)
    storage = {name: sharding.storage[name] for name in shapes}
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    small = {name for name, x in shapes.items() if x.size <= _COMPUTED_WHOLE}

    def program(names: Collection[str], lies: Mapping[str, NamedSharding]) -> Params:
        return jax.jit(lambda: {n: x for n, x in init().items() if n in names}, out_shardings=dict(lies))()

    # A part whose size is odd to the vectors of a CPU is computed by other instructions than the whole, which round
    # differently (XLA of jax 0.12). Parts of large arrays are not odd, and large arrays are not whole anywhere. Cut in
    # a program of its own: in one, XLA would compute no more than is kept.
    whole = program(small, dict.fromkeys(small, everywhere))
    cut = wait_on_cpu(jax.jit(lambda x: x, out_shardings={name: storage[name] for name in small})(wait_on_cpu(whole)))
    return {**program(shapes.keys() - small, {n: x for n, x in storage.items() if n not in small}), **cut}


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
    # Under jit with shardings, so that no device ever holds the state whole.
    opt_state = jax.jit(tx.init, out_shardings=shardings.opt_state)(trained)
    return TrainState(0, trained, opt_state, copied(trained) if averaged else None, placed)


def copied(params: Params) -> Params:
    """The same values in memory of their own."""
    return jax.jit(lambda p: jax.tree.map(jnp.copy, p))(params)


def to_host(params: Params, *, keep: bool = True) -> dict[str, np.ndarray]:
    """Copies whole parameters off the devices; of several processes, all must call it.

    Those that do not `keep` them take part and get nothing.
    """
    # One at a time: only a piece of one parameter is gathered on the devices while it is copied.
    whole = ((name, np.asarray(x) if x.is_fully_addressable else gather_to_host(x)) for name, x in params.items())
    return {name: x for name, x in whole if keep}
