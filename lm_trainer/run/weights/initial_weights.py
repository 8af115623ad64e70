"""The origin of a run's weights, in one ordered list."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from lm_trainer.checkpoint.store import CheckpointError, CheckpointStore, Restored, committed_steps, read_step
from lm_trainer.core.errors import UserError
from lm_trainer.core.tree import named_leaves
from lm_trainer.data import Tokenizer
from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.files.find_run import find_checkpoints
from lm_trainer.run.weights.adapters import load_whole
from lm_trainer.run.weights.saved_model import AVERAGED, read_vocabulary
from lm_trainer.run.weights.saved_state import OPT_STATE, Fingerprint, expected_arrays, resumed_state
from lm_trainer.step.state.train_state import TrainState

logger = logging.getLogger(__name__)

_OWN_REMEDY = "Undo the change, set trainer.id to start another run, or go on by --allow-config-change"
_OTHERS_REMEDY = (
    "Use the data of that run, take its weights alone by trainer.initialize_from, or go on by --allow-config-change"
)


@dataclass(frozen=True)
class Request:
    """A run that asks for its first state.

    Attributes:
        trainer: names what may be loaded.
        setup: the run's.
        store: its own checkpoints.
        init: makes the state of a run that loads nothing: of the values that the model comes with, or of the seed.
        fingerprint: of the data of the first steps, as many as are given.
        allow_other_data: go on, with a warning, from a checkpoint that was trained on other data.
    """

    trainer: TrainerConfig
    setup: TrainingSetup
    store: CheckpointStore
    init: Callable[[], TrainState]
    fingerprint: Callable[[int], Fingerprint]
    allow_other_data: bool = False


class Start(NamedTuple):
    """The state that a run goes on from, and the checkpoint that it goes on with."""

    state: TrainState
    record: Mapping[str, Any] = MappingProxyType({})
    """The JSON that was saved with the checkpoint, its own or another run's; empty where the steps begin at 0."""


def find_start(request: Request) -> Start:
    """The state to train on from: of the first of `ORIGINS` that is there.

    Raises:
        UserError: when a checkpoint must be there and is not, holds another model, or belongs to other data.
    """
    # A generator: an origin is asked only where none before it has anything.
    found = (origin(request) for origin in ORIGINS)
    return next(start for start in found if start is not None)


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
            f"{find_checkpoints(source)[0] / 'tokenizer'}"
        )
    return vocab_size


def own_checkpoint(request: Request) -> Start | None:
    """The run's newest checkpoint that is intact."""
    trainer, store = request.trainer, request.store
    if trainer.load_checkpoint is not False:
        restored = store.restore(expected_arrays(request.setup), partial=trainer.allow_partial_checkpoint)
        return None if restored is None else _resume(request, restored, _OWN_REMEDY)
    if store.steps():
        raise UserError(
            f"trainer.load_checkpoint is false, but {store.directory} holds checkpoints of this run; set trainer.id to "
            f"another name, or remove them"
        )
    return None


def load_checkpoint_path(request: Request) -> Start | None:
    """The checkpoint of another run, with its optimizer and its step: `trainer.load_checkpoint_path`."""
    trainer = request.trainer
    if trainer.load_checkpoint is False:
        return None
    if trainer.load_checkpoint_path is not None:
        found = _other_checkpoint(trainer.load_checkpoint_path, request.setup, trainer.allow_partial_checkpoint)
        return _resume(request, found, _OTHERS_REMEDY)
    if trainer.load_checkpoint:
        raise UserError(f"trainer.load_checkpoint is true, but there is no checkpoint in {request.store.directory}")
    return None


def initialize_from(request: Request) -> Start | None:
    """The weights alone of another run: `trainer.initialize_from`."""
    path = request.trainer.initialize_from
    if path is None:
        return None
    setup = request.setup
    named = {name: np.asarray(x) for name, x in named_leaves(load_whole(path).params).items()}
    wanted = setup.model.shapes
    if request.trainer.allow_partial_checkpoint and (missing := set(wanted) - set(named)):
        _announce(path, missing)
        state = request.init()
        fresh = {**state.frozen, **state.params}
        named |= {name: np.asarray(fresh[name]) for name in missing}
    differences = [
        f"{name}: {_shape(named.get(name))} there, {_shape(wanted.get(name))} here"
        for name in sorted({*named, *wanted})
        if _shape(named.get(name)) != _shape(wanted.get(name))
    ]
    if differences:
        raise UserError(f"trainer.initialize_from: {path} is another model:\n  " + "\n  ".join(differences[:8]))
    # The other run may have had another precision.
    return Start(setup.from_weights({name: x.astype(wanted[name].dtype) for name, x in named.items()}))


def given_or_seed(request: Request) -> Start | None:
    """The values that the model comes with: `initialize_from_hf`, the base of an adapter, a model given; else fresh."""
    return Start(request.init())


ORIGINS: tuple[Callable[[Request], Start | None], ...] = (
    own_checkpoint,
    load_checkpoint_path,
    initialize_from,
    given_or_seed,
)
"""The origins of weights in their order; the first that is there is taken. A run that was begun goes on: the start that
its configuration names matters only until it has a checkpoint of its own."""


def _resume(request: Request, restored: Restored, remedy: str) -> Start:
    _check_data(restored, request.fingerprint(restored.step), request.allow_other_data, remedy)
    _announce(f"the checkpoint of step {restored.step}", set(expected_arrays(request.setup)) - set(restored.arrays))
    return Start(resumed_state(restored, request.setup, request.init), restored.record)


def _other_checkpoint(path: str, setup: TrainingSetup, partial: bool) -> Restored:
    directory, named = find_checkpoints(path)
    problems = []
    # A step that the user named is used or refused; without a name an older one will do.
    for step in [named] if named is not None else reversed(committed_steps(directory)):
        try:
            return read_step(directory, step, expected_arrays(setup), partial=partial)
        except CheckpointError as error:
            problems.append(f"step {step}: {error}")
            logger.error("%s: the checkpoint of step %d cannot be used: %s", directory, step, error)
    raise UserError(
        f"trainer.load_checkpoint_path: {path} holds no checkpoint that can be used\n  " + "\n  ".join(problems)
    )


def _check_data(restored: Restored, now: Fingerprint, allow_other: bool, remedy: str = _OWN_REMEDY) -> None:
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
        raise UserError(f"{problem}. {remedy}")
    logger.warning("%s; training goes on", problem)


def _announce(source: str, missing: Collection[str]) -> None:
    """Names what a partial checkpoint lacks."""
    if missing:
        names = sorted(missing, key=lambda name: (name.startswith((OPT_STATE, AVERAGED)), name))
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        logger.warning("%s lacks %s%s; this starts afresh", source, ", ".join(names[:8]), more)


def _shape(x: Any) -> Any:
    return None if x is None else tuple(x.shape)
