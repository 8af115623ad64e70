"""Saves the training state in a checkpoint, and restores it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from lm_trainer.checkpoint.digest import compile_checksums, compile_hashes, find_non_finite
from lm_trainer.checkpoint.store import CheckpointStore, Restored
from lm_trainer.core.errors import NonFiniteError
from lm_trainer.core.tree import from_named_leaves, named_leaves
from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.run.weights.adapters import FROZEN, check_frozen_params, hash_frozen_params
from lm_trainer.run.weights.saved_model import AVERAGED, PARAMS
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.train_state import TrainState, copy_params

Fingerprint = str | Mapping[str, str]
"""Data fingerprint: a string, or the entries `tokens` and `sources` from `lm_trainer.data`. `tokens` is missing while
text is being tokenised."""

OPT_STATE = "opt_state."
"""Prefix of the optimizer state in the array names of a checkpoint."""


def save_state(
    store: CheckpointStore,
    state: TrainState,
    setup: TrainingSetup,
    record: Mapping[str, Any],
    *,
    in_memory: bool = False,
) -> None:
    """Starts to save a checkpoint asynchronously, with the state needed to resume and the weights to export.

    Args:
        store: the checkpoint store.
        state: the state to save.
        setup: model, optimizer, shardings and compiled functions of the run.
        record: JSON record to save with the state.
        in_memory: keep a copy in the memory of the machines instead.

    Raises:
        NonFiniteError: if a parameter contains a non-finite value, because training could not continue from it.
        MachineError: if this or the previous save failed.
    """
    if bad := find_non_finite(state.params):
        raise NonFiniteError(
            f"after step {state.step} {', '.join(bad[:3])}{' and others' if len(bad) > 3 else ''} "
            f"{'are' if len(bad) > 1 else 'is'} not finite, so no checkpoint was written of it (there are: "
            f"{', '.join(map(str, store.steps())) or 'none'}). Lower optimizer.learning_rate"
        )
    arrays = arrays_to_save(state, setup)
    # Frozen parameters other than constants are not saved. A resumed run verifies them by their digest.
    if setup.freezes:
        record = {**record, FROZEN: hash_frozen_params(state.frozen)}
    save = store.save_copy if in_memory else store.save
    save(state.step, arrays, record)


def compile_hashing(setup: TrainingSetup) -> None:
    """Compiles the programs with which the states of a run are checked and hashed, so that no save waits for them."""
    params, _ = _abstract_state(setup)
    compile_hashes(params)
    compile_checksums(abstract_checkpoint(setup))


def arrays_to_save(state: TrainState, setup: TrainingSetup) -> dict[str, Any]:
    """Returns the arrays of a training state that a checkpoint contains, by their names in the checkpoint."""
    *_, export = setup.weights_to_evaluate(state).values()
    params = {**state.params, **{name: state.frozen[name] for name in setup.model.constants}}
    averaged = {name: export[name] for name in params} if _exports_other_weights(setup) else None
    return _name_arrays(params, state.opt_state, averaged)


def abstract_checkpoint(setup: TrainingSetup) -> dict[str, Any]:
    """Returns the shape, dtype and sharding of every array in a checkpoint of this run, by name in the checkpoint."""
    params, opt_state = _abstract_state(setup)
    storage, shapes = setup.sharding.storage, setup.model.shapes
    params |= {
        name: jax.ShapeDtypeStruct(shapes[name].shape, shapes[name].dtype, sharding=storage[name])
        for name in setup.model.constants
    }
    return _name_arrays(params, opt_state, params if _exports_other_weights(setup) else None)


def restore_state(restored: Restored, setup: TrainingSetup, init: Callable[[], TrainState]) -> TrainState:
    """Restores the training state from a checkpoint.

    Missing arrays and frozen parameters come from a new initial state.

    Raises:
        UserError: if the checkpoint was trained with other frozen parameters.
    """
    arrays = restored.arrays
    model = setup.model
    frozen: Any = {name: arrays[PARAMS + name] for name in model.constants if PARAMS + name in arrays}
    has_other_frozen = bool(model.shapes.keys() - model.trainable - model.constants)
    # A new initial state takes as much memory as the restored one, so it is only created if needed.
    if has_other_frozen or set(abstract_checkpoint(setup)) - set(arrays):
        fresh = init()
        frozen = {**fresh.frozen, **frozen}
        if has_other_frozen:
            check_frozen_params(restored, frozen)
        arrays = {**_name_arrays(fresh.params, fresh.opt_state, None), **arrays}
    params, opt_state = _abstract_state(setup)
    named = {name: arrays[OPT_STATE + name] for name in named_leaves(opt_state)}
    trained = {name: arrays[PARAMS + name] for name in params}
    averaged = _restore_averages(arrays, trained) if setup.averages else None
    return TrainState(restored.step, trained, from_named_leaves(opt_state, named), averaged, frozen)


def _exports_other_weights(setup: TrainingSetup) -> bool:
    """Returns True if the weights to export differ from the trained weights."""
    return setup.averages or setup.has_eval_params


def _name_arrays(params: Any, opt_state: Any, averaged: Any) -> dict[str, Any]:
    return {
        **{PARAMS + name: x for name, x in params.items()},
        **{AVERAGED + name: x for name, x in (averaged or {}).items()},
        **{OPT_STATE + name: x for name, x in named_leaves(opt_state).items()},
    }


def _abstract_state(setup: TrainingSetup) -> tuple[dict[str, Any], Any]:
    """Returns the shapes, dtypes and shardings of the trained parameters and of the optimizer state."""

    def to_shape_dtype(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    shardings = setup.sharding.trained
    params = {name: to_shape_dtype(setup.model.shapes[name], sharding) for name, sharding in shardings.params.items()}
    opt_state = jax.tree.map(to_shape_dtype, jax.eval_shape(setup.tx.init, params), shardings.opt_state)
    return params, opt_state


def _restore_averages(arrays: dict[str, Any], trained: Params) -> Params:
    """Returns the averaged weights in a checkpoint. Averages that are missing start at the trained weights."""
    missing = {name: x for name, x in trained.items() if AVERAGED + name not in arrays}
    # Copies the weights, because a step donates both parameters and averages, and an array cannot be donated twice.
    initial = copy_params(missing) if missing else {}
    return {name: initial[name] if name in initial else arrays[AVERAGED + name] for name in trained}
