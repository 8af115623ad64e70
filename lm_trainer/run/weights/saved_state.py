"""The state of a run in a checkpoint: the arrays that are saved of it, and the state that they are read back to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from lm_trainer.checkpoint.digest import not_finite
from lm_trainer.checkpoint.store import CheckpointStore, Restored
from lm_trainer.core.errors import NonFiniteError
from lm_trainer.core.tree import from_named_leaves, named_leaves
from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.run.weights.adapters import FROZEN, check_frozen, frozen_digest
from lm_trainer.run.weights.saved_model import AVERAGED, PARAMS
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.train_state import TrainState, copied

Fingerprint = str | Mapping[str, str]
"""Fingerprint of data: a text, or the `tokens` and `sources` of `lm_trainer.data`; `tokens` may still be unknown."""

OPT_STATE = "opt_state."
"""Prefix of the names of the optimizer's arrays in a checkpoint."""


def save_state(store: CheckpointStore, state: TrainState, setup: TrainingSetup, record: Mapping[str, Any]) -> None:
    """Starts an asynchronous checkpoint of everything that a resume needs, and of the weights to export.

    Raises:
        NonFiniteError: when a parameter holds a number that is not finite, from which no step could go on.
        MachineError: when this or the previous save failed.
    """
    if bad := not_finite(state.params):
        raise NonFiniteError(
            f"after step {state.step} {', '.join(bad[:3])}{' and others' if len(bad) > 3 else ''} "
            f"{'are' if len(bad) > 1 else 'is'} not finite, so no checkpoint was written of it (there are: "
            f"{', '.join(map(str, store.steps())) or 'none'}). Lower optimizer.learning_rate"
        )
    arrays = saved_arrays(state, setup)
    # Other frozen parameters are not saved: by their digest a resume knows that it has the same ones.
    if setup.freezes:
        record = {**record, FROZEN: frozen_digest(state.frozen)}
    store.save(state.step, arrays, record)


def saved_arrays(state: TrainState, setup: TrainingSetup) -> dict[str, Any]:
    """The arrays that a checkpoint holds of a state, under the names that they have there."""
    *_, export = setup.weights(state).values()
    params = {**state.params, **{name: state.frozen[name] for name in setup.model.constants}}
    averaged = {name: export[name] for name in params} if _exports_others(setup) else None
    return _named(params, state.opt_state, averaged)


def expected_arrays(setup: TrainingSetup) -> dict[str, Any]:
    """Shape, dtype and sharding of every array that a checkpoint of this run holds, by the name that it has there."""
    params, opt_state = _abstract(setup)
    storage, shapes = setup.sharding.storage, setup.model.shapes
    params |= {
        name: jax.ShapeDtypeStruct(shapes[name].shape, shapes[name].dtype, sharding=storage[name])
        for name in setup.model.constants
    }
    return _named(params, opt_state, params if _exports_others(setup) else None)


def resumed_state(restored: Restored, setup: TrainingSetup, init: Callable[[], TrainState]) -> TrainState:
    """The state of a checkpoint; what it lacks, and what is frozen, is taken from a fresh one.

    Raises:
        UserError: when the frozen parameters are others than those that it was trained beside.
    """
    arrays = restored.arrays
    model = setup.model
    frozen: Any = {name: arrays[PARAMS + name] for name in model.constants if PARAMS + name in arrays}
    elsewhere = bool(model.shapes.keys() - model.trainable - model.constants)
    # A fresh state takes as much memory as this one, so it is made only where something of it is needed.
    if elsewhere or set(expected_arrays(setup)) - set(arrays):
        fresh = init()
        frozen = {**fresh.frozen, **frozen}
        if elsewhere:
            check_frozen(restored, frozen)
        arrays = {**_named(fresh.params, fresh.opt_state, None), **arrays}
    params, opt_state = _abstract(setup)
    named = {name: arrays[OPT_STATE + name] for name in named_leaves(opt_state)}
    trained = {name: arrays[PARAMS + name] for name in params}
    averaged = _averages(arrays, trained) if setup.averages else None
    return TrainState(restored.step, trained, from_named_leaves(opt_state, named), averaged, frozen)


def _exports_others(setup: TrainingSetup) -> bool:
    """True if the weights to export are others than those that are trained."""
    return setup.averages or setup.averages_by_itself


def _named(params: Any, opt_state: Any, averaged: Any) -> dict[str, Any]:
    return {
        **{PARAMS + name: x for name, x in params.items()},
        **{AVERAGED + name: x for name, x in (averaged or {}).items()},
        **{OPT_STATE + name: x for name, x in named_leaves(opt_state).items()},
    }


def _abstract(setup: TrainingSetup) -> tuple[dict[str, Any], Any]:
    """The trained parameters and the optimizer's state as shapes, dtypes and shardings."""

    def place(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    shardings = setup.sharding.trained
    params = {name: place(setup.model.shapes[name], sharding) for name, sharding in shardings.params.items()}
    opt_state = jax.tree.map(place, jax.eval_shape(setup.tx.init, params), shardings.opt_state)
    return params, opt_state


def _averages(arrays: dict[str, Any], trained: Params) -> Params:
    """The averages of a checkpoint; those that it lacks begin at the weights."""
    lacking = {name: x for name, x in trained.items() if AVERAGED + name not in arrays}
    # Copies: the step consumes parameters and averages, and one array cannot be given away twice.
    begun = copied(lacking) if lacking else {}
    return {name: begun[name] if name in begun else arrays[AVERAGED + name] for name in trained}
