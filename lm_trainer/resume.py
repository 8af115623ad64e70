"""Where a run starts: at its newest checkpoint, at given weights, or from scratch; and how its state is saved."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from lm_trainer.checkpoint.model import PARAMS, load_model, locate, read_vocabulary
from lm_trainer.checkpoint.store import CheckpointError, CheckpointStore, Restored, committed_steps, read_step
from lm_trainer.config.run import RunConfig
from lm_trainer.core.errors import UserError
from lm_trainer.core.tree import from_named_leaves, named_leaves
from lm_trainer.data import Tokenizer
from lm_trainer.program import Program
from lm_trainer.train_state import TrainState, state_from_params

_OPT_STATE = "opt_state."


def choose_vocab_size(config: RunConfig, tokenizer: Tokenizer) -> int:
    """The tokenizer's vocabulary, or that of the model whose weights the run starts from, which may be padded.

    Raises:
        UserError: when those weights were made for another tokenizer.
    """
    source = config.trainer.initialize_from
    if source is None:
        return tokenizer.vocab_size
    vocab_size, made_for = read_vocabulary(source)
    if made_for.fingerprint() != tokenizer.fingerprint():
        raise UserError(
            f"trainer.initialize_from: {source} was made for another tokenizer than data.tokenizer; its own is in "
            f"{locate(source)[0] / 'tokenizer'}"
        )
    return vocab_size


def start_state(config: RunConfig, program: Program, store: CheckpointStore, data_fingerprint: str) -> TrainState:
    """The state to train on from.

    In this order: the run's own newest intact checkpoint; `load_checkpoint_path`; the weights of `initialize_from`;
    fresh weights.

    Raises:
        UserError: when a checkpoint must be there and is not, holds another model, or belongs to other data.
    """
    trainer = config.trainer
    if trainer.load_checkpoint is not False:
        restored = _own_checkpoint(program, store)
        if restored is None and trainer.load_checkpoint_path is not None:
            restored = _other_checkpoint(trainer.load_checkpoint_path, program)
        if restored is not None:
            return _resumed(restored, program, data_fingerprint)
        if trainer.load_checkpoint:
            raise UserError(f"trainer.load_checkpoint is true, but there is no checkpoint in {store.directory}")
    elif store.steps():
        raise UserError(
            f"trainer.load_checkpoint is false, but {store.directory} holds checkpoints of this run; set trainer.id to "
            f"another name, or remove them"
        )
    if trainer.initialize_from is not None:
        return _from_weights(trainer.initialize_from, program)
    return program.init()


def save_state(store: CheckpointStore, state: TrainState, program: Program, record: dict[str, Any]) -> None:
    """Starts an asynchronous checkpoint of everything that a resume needs."""
    store.save(state.step, _arrays(state.params, state.opt_state), {"vocab_size": program.spec.vocab_size, **record})


def _arrays(params: Any, opt_state: Any) -> dict[str, Any]:
    return {
        **{PARAMS + name: x for name, x in params.items()},
        **{_OPT_STATE + name: x for name, x in named_leaves(opt_state).items()},
    }


def _abstract(program: Program) -> tuple[dict[str, Any], Any]:
    """The state as shapes, dtypes and shardings."""

    def place(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params = {name: place(x, program.placement.shardings.params[name]) for name, x in program.model.shapes.items()}
    opt_state = jax.tree.map(place, jax.eval_shape(program.tx.init, params), program.placement.shardings.opt_state)
    return params, opt_state


def _own_checkpoint(program: Program, store: CheckpointStore) -> Restored | None:
    return store.restore(_arrays(*_abstract(program)))


def _other_checkpoint(path: str, program: Program) -> Restored:
    directory, named = locate(path)
    like = _arrays(*_abstract(program))
    problems = []
    for step in [named] if named is not None else reversed(committed_steps(directory)):
        try:
            return read_step(directory, step, like)
        except CheckpointError as error:
            problems.append(f"step {step}: {error}")
    raise UserError(
        f"trainer.load_checkpoint_path: {path} holds no checkpoint that can be used\n  " + "\n  ".join(problems)
    )


def _resumed(restored: Restored, program: Program, data_fingerprint: str) -> TrainState:
    saved = restored.record.get("data_fingerprint")
    if saved != data_fingerprint:
        raise UserError(
            f"the checkpoint of step {restored.step} was trained on other data (fingerprint {saved}, now "
            f"{data_fingerprint}): the text, the tokenizer, the order or the sequence length has changed. Undo the "
            f"change, or set trainer.id to start another run"
        )
    params, opt_state = _abstract(program)
    params = {name: restored.arrays[PARAMS + name] for name in params}
    named = {name: restored.arrays[_OPT_STATE + name] for name in named_leaves(opt_state)}
    return TrainState(restored.step, params, from_named_leaves(opt_state, named))


def _from_weights(path: str, program: Program) -> TrainState:
    loaded = load_model(path)
    named = {name: np.asarray(x) for name, x in named_leaves(loaded.params).items()}
    wanted = program.model.shapes
    differences = [
        f"{name}: {_shape(named.get(name))} there, {_shape(wanted.get(name))} here"
        for name in sorted({*named, *wanted})
        if _shape(named.get(name)) != _shape(wanted.get(name))
    ]
    if differences:
        raise UserError(f"trainer.initialize_from: {path} is another model:\n  " + "\n  ".join(differences[:8]))
    placed = {name: x.astype(wanted[name].dtype) for name, x in named.items()}
    return state_from_params(placed, program.tx, program.placement.shardings)


def _shape(x: Any) -> Any:
    return None if x is None else tuple(x.shape)
