"""The possible origins of the initial weights of a run, in order of priority."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from lm_trainer.checkpoint.store import CheckpointError, CheckpointStore, Restored, list_steps, read_step
from lm_trainer.core.errors import UserError
from lm_trainer.core.tree import named_leaves
from lm_trainer.data import Tokenizer
from lm_trainer.nn.logit_clip import is_largest_logits
from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.files.branch import BranchPoint
from lm_trainer.run.files.find_run import find_checkpoints
from lm_trainer.run.weights.adapters import load_merged_model, with_own_loads
from lm_trainer.run.weights.saved_model import AVERAGED, PARAMS, read_vocabulary
from lm_trainer.run.weights.saved_state import OPT_STATE, Fingerprint, abstract_checkpoint, restore_state
from lm_trainer.step.state.train_state import TrainState

logger = logging.getLogger(__name__)

_OWN_REMEDY = "Undo the change, set trainer.id to start another run, or go on by --allow-config-change"
_OTHER_RUN_REMEDY = (
    "Use the data of that run, take its weights alone by trainer.initialize_from, or go on by --allow-config-change"
)


@dataclass(frozen=True)
class StartRequest:
    """Inputs for choosing the initial state of a run.

    Attributes:
        trainer: trainer section, which names the checkpoints to load.
        setup: model, optimizer, shardings and compiled functions of the run.
        store: checkpoints of the run itself.
        init: creates the state of a run that loads no checkpoint, from the initial weights of the model or from the
            seed.
        fingerprint: returns the fingerprint of the data for a number of steps.
        allow_other_data: continue, with a warning, from a checkpoint that was trained on other data.
        branch: start of the run if it is a branch.
    """

    trainer: TrainerConfig
    setup: TrainingSetup
    store: CheckpointStore
    init: Callable[[], TrainState]
    fingerprint: Callable[[int], Fingerprint]
    allow_other_data: bool = False
    branch: BranchPoint | None = None


class Start(NamedTuple):
    """The initial state of an attempt, and the record of the checkpoint it comes from."""

    state: TrainState
    record: Mapping[str, Any] = MappingProxyType({})
    """JSON record of the checkpoint to resume from, of this or another run; empty if training starts at step 0."""


def load_initial_state(request: StartRequest) -> Start:
    """Returns the state to start training from, which comes from the first available origin in `ORIGINS`.

    Raises:
        UserError: if a required checkpoint is missing, contains another model, or was trained on other data.
    """
    # This is a generator, so that an origin is only tried if all previous ones returned None.
    starts = (origin(request) for origin in ORIGINS)
    return next(start for start in starts if start is not None)


def choose_vocab_size(trainer: TrainerConfig, tokenizer: Tokenizer) -> int:
    """Returns the vocabulary size of the tokenizer, or of the model in `initialize_from`, which may be padded.

    Raises:
        UserError: if the initial weights were trained with another tokenizer.
    """
    source = trainer.initialize_from
    if source is None:
        return tokenizer.vocab_size
    vocab_size, saved_tokenizer = read_vocabulary(source)
    if saved_tokenizer.identity() != tokenizer.identity():
        raise UserError(
            f"trainer.initialize_from: {source} was made for another tokenizer than data.tokenizer; its own is in "
            f"{find_checkpoints(source)[0] / 'tokenizer'}"
        )
    return vocab_size


def begin_changed_branch(request: StartRequest) -> Start | None:
    """Begins a branch whose state has other arrays than its first checkpoint; the new arrays get their initial values.

    With another optimizer, its state is new, and so are averaged weights. Largest attention logits are measured in
    every step, so a branch may begin or stop to measure them.
    """
    branch, store = request.branch, request.store
    if branch is None or not branch.changes_state or store.steps()[-1:] != [branch.step]:
        return None

    def is_kept(name: str) -> bool:
        kept_by_optimizer = name.startswith(PARAMS) or not branch.fresh_optimizer
        return kept_by_optimizer and not (branch.other_measurements and is_largest_logits(name))

    like = {name: x for name, x in abstract_checkpoint(request.setup).items() if is_kept(name)}
    try:
        restored = read_step(store.directory, branch.step, like, selects=is_kept)
    except CheckpointError as error:
        raise UserError(f"{store.directory}: the checkpoint of step {branch.step} cannot be used: {error}") from error
    return _resume(request, restored, _OWN_REMEDY)


def resume_own_checkpoint(request: StartRequest) -> Start | None:
    """Loads the newest intact checkpoint of the run itself."""
    trainer, store = request.trainer, request.store
    if trainer.load_checkpoint is not False:
        restored = store.restore(abstract_checkpoint(request.setup), partial=trainer.allow_partial_checkpoint)
        return None if restored is None else _resume(request, restored, _OWN_REMEDY)
    if store.steps():
        raise UserError(
            f"trainer.load_checkpoint is false, but {store.directory} holds checkpoints of this run; set trainer.id to "
            f"another name, or remove them"
        )
    return None


def load_checkpoint_path(request: StartRequest) -> Start | None:
    """Loads a checkpoint of another run (`trainer.load_checkpoint_path`), including its optimizer state and step."""
    trainer = request.trainer
    if trainer.load_checkpoint is False:
        return None
    if trainer.load_checkpoint_path is not None:
        checkpoint = _read_other_checkpoint(
            trainer.load_checkpoint_path, request.setup, trainer.allow_partial_checkpoint
        )
        return _resume(request, checkpoint, _OTHER_RUN_REMEDY)
    if trainer.load_checkpoint:
        raise UserError(f"trainer.load_checkpoint is true, but there is no checkpoint in {request.store.directory}")
    return None


def initialize_from(request: StartRequest) -> Start | None:
    """Loads only the weights of another run (`trainer.initialize_from`)."""
    path = request.trainer.initialize_from
    if path is None:
        return None
    setup = request.setup
    shapes = setup.model.shapes
    weights = {name: np.asarray(x) for name, x in named_leaves(load_merged_model(path).params).items()}
    weights = with_own_loads(weights, shapes)
    if request.trainer.allow_partial_checkpoint and (missing := set(shapes) - set(weights)):
        _log_missing(path, missing)
        state = request.init()
        fresh = {**state.frozen, **state.params}
        weights |= {name: np.asarray(fresh[name]) for name in missing}
    differences = [
        f"{name}: {_shape_of_array(weights.get(name))} there, {_shape_of_array(shapes.get(name))} here"
        for name in sorted({*weights, *shapes})
        if _shape_of_array(weights.get(name)) != _shape_of_array(shapes.get(name))
    ]
    if differences:
        raise UserError(f"trainer.initialize_from: {path} is another model:\n  " + "\n  ".join(differences[:8]))
    # The other run may have used a different parameter dtype.
    return Start(setup.from_weights({name: x.astype(shapes[name].dtype) for name, x in weights.items()}))


def initialize_model(request: StartRequest) -> Start | None:
    """Uses the initial weights of the model (`initialize_from_hf`, adapter base, user-defined), or random ones."""
    return Start(request.init())


ORIGINS: tuple[Callable[[StartRequest], Start | None], ...] = (
    begin_changed_branch,
    resume_own_checkpoint,
    load_checkpoint_path,
    initialize_from,
    initialize_model,
)
"""Origins of the initial weights in order of priority. The first available origin is used. A run that has checkpoints
always resumes from them, so the configured origin only matters before the first checkpoint."""


def _resume(request: StartRequest, restored: Restored, remedy: str) -> Start:
    begins = request.branch if request.branch is not None and request.branch.step == restored.step else None
    if begins is None or not begins.other_data:
        _check_same_data(restored, request.fingerprint(restored.step), request.allow_other_data, remedy)
    if begins is None or not begins.changes_state:
        missing = set(abstract_checkpoint(request.setup)) - set(restored.arrays)
        _log_missing(f"the checkpoint of step {restored.step}", missing)
    return Start(restore_state(restored, request.setup, request.init), restored.record)


def _read_other_checkpoint(path: str, setup: TrainingSetup, partial: bool) -> Restored:
    directory, requested = find_checkpoints(path)
    problems = []
    # If a step was requested, only that step is tried. Otherwise older steps are tried if the newest one is damaged.
    for step in [requested] if requested is not None else reversed(list_steps(directory)):
        try:
            return read_step(directory, step, abstract_checkpoint(setup), partial=partial)
        except CheckpointError as error:
            problems.append(f"step {step}: {error}")
            logger.error("%s: the checkpoint of step %d cannot be used: %s", directory, step, error)
    raise UserError(
        f"trainer.load_checkpoint_path: {path} holds no checkpoint that can be used\n  " + "\n  ".join(problems)
    )


class OtherDataError(UserError):
    """A checkpoint was trained on other data than the current ones.

    Attributes:
        problem: the message without the remedy, which is for someone who trains.
    """

    def __init__(self, problem: str, remedy: str):
        super().__init__(f"{problem}. {remedy}")
        self.problem = problem


def _check_same_data(restored: Restored, current: Fingerprint, allow_other: bool, remedy: str = _OWN_REMEDY) -> None:
    saved = restored.record.get("data_fingerprint")
    if saved == current:
        return
    old, new = ({"tokens": value} if isinstance(value, str) else value or {} for value in (saved, current))
    # If the text was still being tokenised at the checkpoint, or still is, only the sources are known.
    common_key = next((name for name in ("tokens", "sources") if name in old and name in new), None)
    if common_key and old[common_key] == new[common_key]:
        return
    if new and not common_key and not allow_other:
        raise UserError(
            f"the checkpoint of step {restored.step} knows its data by their tokens alone, and the text is still being "
            f"tokenised; run `lmt data build` with this configuration first, then start again"
        )
    changed = "the text" if common_key == "tokens" else "the name, size or time of a file of text"
    key = common_key or "tokens"
    problem = (
        f"the checkpoint of step {restored.step} was trained on other data (fingerprint {old.get(key)}, now "
        f"{new.get(key)}): {changed}, the tokenizer, the order or the sequence length has changed"
    )
    if not allow_other:
        raise OtherDataError(problem, remedy)
    logger.warning("%s; training goes on", problem)


def _log_missing(source: str, missing: Collection[str]) -> None:
    """Logs the names of the arrays that are missing in a partial checkpoint."""
    if missing:
        names = sorted(missing, key=lambda name: (name.startswith((OPT_STATE, AVERAGED)), name))
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        logger.warning("%s lacks %s%s; this starts afresh", source, ", ".join(names[:8]), more)


def _shape_of_array(x: Any) -> Any:
    return None if x is None else tuple(x.shape)
