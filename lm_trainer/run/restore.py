"""Where a run starts: at its newest checkpoint, at given weights, or from scratch; and how its state is saved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np

from lm_trainer.checkpoint.digest import not_finite
from lm_trainer.checkpoint.store import CheckpointError, CheckpointStore, Restored, committed_steps, read_step
from lm_trainer.core.errors import NonFiniteError, UserError
from lm_trainer.core.tree import from_named_leaves, named_leaves
from lm_trainer.data import Tokenizer
from lm_trainer.run.adapters import FROZEN, check_frozen, frozen_digest, load_whole
from lm_trainer.run.program import Program
from lm_trainer.run.saved_model import AVERAGED, PARAMS, locate, read_vocabulary
from lm_trainer.run.trainer_config import TrainerConfig
from lm_trainer.step.state import Params, TrainState, copied

logger = logging.getLogger(__name__)

Fingerprint = str | Mapping[str, str]
"""Of data: a text, or as `lm_trainer.data` makes it, `tokens` and `sources`, of which `tokens` may still be unknown."""

_OPT_STATE = "opt_state."


def choose_vocab_size(trainer: TrainerConfig, tokenizer: Tokenizer) -> int:
    """The tokenizer's vocabulary, or that of the model whose weights the run starts from, which may be padded.

    Raises:
        UserError: when those weights were made for another tokenizer.
    """
    source = trainer.initialize_from
    if source is None:
        return tokenizer.vocab_size
    vocab_size, made_for = read_vocabulary(source)
    if made_for.identity() != tokenizer.identity():
        raise UserError(
            f"trainer.initialize_from: {source} was made for another tokenizer than data.tokenizer; its own is in "
            f"{locate(source)[0] / 'tokenizer'}"
        )
    return vocab_size


def start_state(
    trainer: TrainerConfig,
    program: Program,
    store: CheckpointStore,
    init: Callable[[], TrainState],
    fingerprint: Callable[[int], Fingerprint],
    *,
    allow_other_data: bool = False,
) -> TrainState:
    """The state to train on from.

    In this order: the run's own newest intact checkpoint; `load_checkpoint_path`; the weights of `initialize_from`;
    fresh weights.

    Args:
        trainer: what may be loaded from where.
        program: the run.
        store: its own checkpoints.
        init: makes a fresh state.
        fingerprint: of the data up to a step.
        allow_other_data: go on, with a warning, from a checkpoint that was trained on other data.

    Raises:
        UserError: when a checkpoint must be there and is not, holds another model, or belongs to other data.
    """
    if trainer.load_checkpoint is not False:
        partial = trainer.allow_partial_checkpoint
        restored = store.restore(_like(program), partial=partial)
        if restored is None and trainer.load_checkpoint_path is not None:
            restored = _other_checkpoint(trainer.load_checkpoint_path, program, partial=partial)
        if restored is not None:
            _check_data(restored, fingerprint(restored.step), allow_other_data)
            return _resumed(restored, program, init)
        if trainer.load_checkpoint:
            raise UserError(f"trainer.load_checkpoint is true, but there is no checkpoint in {store.directory}")
    elif store.steps():
        raise UserError(
            f"trainer.load_checkpoint is false, but {store.directory} holds checkpoints of this run; set trainer.id to "
            f"another name, or remove them"
        )
    if trainer.initialize_from is not None:
        return _from_weights(trainer.initialize_from, program, init, partial=trainer.allow_partial_checkpoint)
    return init()


def save_state(store: CheckpointStore, state: TrainState, program: Program, record: dict[str, Any]) -> None:
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
    arrays = saved_arrays(state, program)
    if program.freezes:
        record = {**record, FROZEN: frozen_digest(state.frozen)}
    store.save(state.step, arrays, record)


def saved_arrays(state: TrainState, program: Program) -> dict[str, Any]:
    """What a checkpoint holds of a state, under the names that it has there."""
    *_, export = program.weights(state).values()
    averaged = {name: export[name] for name in state.params} if _exports_others(program) else None
    return _arrays(state.params, state.opt_state, averaged)


def _exports_others(program: Program) -> bool:
    """Whether the weights to export are others than those that are trained."""
    return program.averages or program.averages_by_itself


def _arrays(params: Any, opt_state: Any, averaged: Any) -> dict[str, Any]:
    return {
        **{PARAMS + name: x for name, x in params.items()},
        **{AVERAGED + name: x for name, x in (averaged or {}).items()},
        **{_OPT_STATE + name: x for name, x in named_leaves(opt_state).items()},
    }


def _abstract(program: Program) -> tuple[dict[str, Any], Any]:
    """What is trained, and the optimizer's state, as shapes, dtypes and shardings."""

    def place(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    shardings = program.sharding.state
    params = {name: place(program.model.shapes[name], sharding) for name, sharding in shardings.params.items()}
    opt_state = jax.tree.map(place, jax.eval_shape(program.tx.init, params), shardings.opt_state)
    return params, opt_state


def _like(program: Program) -> dict[str, Any]:
    params, opt_state = _abstract(program)
    return _arrays(params, opt_state, params if _exports_others(program) else None)


def _other_checkpoint(path: str, program: Program, *, partial: bool) -> Restored:
    directory, named = locate(path)
    problems = []
    for step in [named] if named is not None else reversed(committed_steps(directory)):
        try:
            return read_step(directory, step, _like(program), partial=partial)
        except CheckpointError as error:
            problems.append(f"step {step}: {error}")
            logger.error("%s: the checkpoint of step %d cannot be used: %s", directory, step, error)
    raise UserError(
        f"trainer.load_checkpoint_path: {path} holds no checkpoint that can be used\n  " + "\n  ".join(problems)
    )


def _check_data(restored: Restored, now: Fingerprint, allow_other: bool) -> None:
    saved = restored.record.get("data_fingerprint")
    if saved == now:
        return
    old, new = ({"tokens": found} if isinstance(found, str) else found or {} for found in (saved, now))
    # Where the text was or is still being tokenised, only what it is made of is known.
    known = next((name for name in ("tokens", "sources") if name in old and name in new), None)
    if known and old[known] == new[known]:
        return
    if new and not known and not allow_other:
        raise UserError(
            f"the checkpoint of step {restored.step} knows its data by their tokens alone, and the text is still being "
            f"tokenised; run `lmt data build` with this configuration first, then start again"
        )
    what = "the text" if known == "tokens" else "the name, size or time of a file of text"
    key = known or "tokens"
    problem = (
        f"the checkpoint of step {restored.step} was trained on other data (fingerprint {old.get(key)}, now "
        f"{new.get(key)}): {what}, the tokenizer, the order or the sequence length has changed"
    )
    if not allow_other:
        raise UserError(
            f"{problem}. Undo the change, set trainer.id to start another run, or go on by --allow-config-change"
        )
    logger.warning("%s; training goes on", problem)


def _resumed(restored: Restored, program: Program, init: Callable[[], TrainState]) -> TrainState:
    arrays = restored.arrays
    frozen: Any = {}
    missing = set(_like(program)) - set(arrays)
    _announce(f"the checkpoint of step {restored.step}", missing)
    if program.freezes or missing:
        fresh = init()
        frozen = fresh.frozen
        if program.freezes:
            check_frozen(restored, frozen)
        arrays = {**_arrays(fresh.params, fresh.opt_state, None), **arrays}
    params, opt_state = _abstract(program)
    named = {name: arrays[_OPT_STATE + name] for name in named_leaves(opt_state)}
    trained = {name: arrays[PARAMS + name] for name in params}
    averaged = _averages(arrays, trained) if program.averages else None
    return TrainState(restored.step, trained, from_named_leaves(opt_state, named), averaged, frozen)


def _averages(arrays: dict[str, Any], trained: Params) -> Params:
    """The averages of a checkpoint; those that it lacks begin at the weights."""
    lacking = {name: x for name, x in trained.items() if AVERAGED + name not in arrays}
    begun = copied(lacking) if lacking else {}
    return {name: begun[name] if name in begun else arrays[AVERAGED + name] for name in trained}


def _announce(source: str, missing: Collection[str]) -> None:
    """Says what a partial checkpoint lacks."""
    if missing:
        names = sorted(missing, key=lambda name: (name.startswith((_OPT_STATE, AVERAGED)), name))
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        logger.warning("%s lacks %s%s; this starts afresh", source, ", ".join(names[:8]), more)


def _from_weights(path: str, program: Program, init: Callable[[], TrainState], *, partial: bool) -> TrainState:
    loaded = load_whole(path)
    named = {name: np.asarray(x) for name, x in named_leaves(loaded.params).items()}
    wanted = program.model.shapes
    if partial and (missing := set(wanted) - set(named)):
        _announce(path, missing)
        state = init()
        fresh = {**state.frozen, **state.params}
        named |= {name: np.asarray(fresh[name]) for name in missing}
    differences = [
        f"{name}: {_shape(named.get(name))} there, {_shape(wanted.get(name))} here"
        for name in sorted({*named, *wanted})
        if _shape(named.get(name)) != _shape(wanted.get(name))
    ]
    if differences:
        raise UserError(f"trainer.initialize_from: {path} is another model:\n  " + "\n  ".join(differences[:8]))
    return program.from_weights({name: x.astype(wanted[name].dtype) for name, x in named.items()})


def _shape(x: Any) -> Any:
    return None if x is None else tuple(x.shape)
