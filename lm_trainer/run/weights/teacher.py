"""The teacher of a distillation: its model section, its checks and its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from jax.sharding import NamedSharding

from lm_trainer.checkpoint.store import CheckpointStore, list_steps
from lm_trainer.core.errors import UserError
from lm_trainer.data import Tokenizer
from lm_trainer.export.huggingface import read_hf_settings
from lm_trainer.export.weights import Weights
from lm_trainer.models import DecoderConfig
from lm_trainer.nn.reference import is_reference_param, name_in_reference, name_outside_reference, policy_params
from lm_trainer.objectives.distillation import DistillationConfig
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.files.find_run import find_checkpoints
from lm_trainer.run.weights.adapters import BaseCheckpoint, read_pinned_step
from lm_trainer.run.weights.open_model import find_hf_directory
from lm_trainer.run.weights.pretrained import HfCheckpoint
from lm_trainer.run.weights.saved_model import read_config, read_vocabulary
from lm_trainer.step.state.model_def import ModelDef, Params

_TEACHER_STEP = "teacher_step"
"""Key of the step of the teacher's checkpoint in the record of every checkpoint."""


class _Loader(Protocol):
    def __call__(self, shapes: Mapping[str, Any], shardings: Mapping[str, Any]) -> Params: ...


@dataclass(frozen=True)
class Teacher:
    """A teacher whose weights can be loaded."""

    load: _Loader
    """Loads the weights in the given shapes and shardings."""
    facts: Mapping[str, Any]
    """Entries for the record of every checkpoint."""

    def with_weights(self, model: ModelDef) -> ModelDef:
        """Returns the model, which contains this teacher, with a function that also loads the teacher's weights."""
        load_start = model.load

        def load(shapes: Mapping[str, Any], shardings: Mapping[str, NamedSharding]) -> Params:
            start = {} if load_start is None else load_start(policy_params(shapes), policy_params(shardings))
            of_teacher = [name for name in shapes if is_reference_param(name)]
            named = {name_outside_reference(name): name for name in of_teacher}
            weights = self.load(
                {short: shapes[name] for short, name in named.items()},
                {short: shardings[name] for short, name in named.items()},
            )
            return {**start, **{name_in_reference(name): x for name, x in weights.items()}}

        return dataclasses.replace(model, load=load)


def resolve_teacher(config: RunConfig) -> RunConfig:
    """Returns the configuration with the model section of the teacher, if the loss has a teacher.

    Raises:
        UserError: if the teacher does not exist, or cannot read the rows of the student.
    """
    loss = config.loss
    if not isinstance(loss, DistillationConfig):
        return config
    path = find_hf_directory(loss.teacher)
    if path is not None:
        model = read_hf_settings(path)[0]
    else:
        model = read_config(find_checkpoints(loss.teacher, "loss.teacher")[0]).model
    if model.features_shape is not None:
        raise UserError(f"loss.teacher: {loss.teacher} hears audio; name a model of text alone")
    if model.seq_len < config.model.seq_len:
        raise UserError(
            f"loss.teacher: {loss.teacher} reads at most {model.seq_len} tokens, but rows have {config.model.seq_len}; "
            f"lower model.seq_len"
        )
    section = {"type": model.type, **model.model_dump(mode="json", exclude_unset=True)}
    return config.model_copy(update={"loss": loss.model_copy(update={"teacher_model": section})})


def find_teacher(config: RunConfig, store: CheckpointStore, tokenizer: Tokenizer, vocab_size: int) -> Teacher | None:
    """Returns the teacher of the loss; None if it has none.

    Args:
        config: configuration of the run, as returned by `resolve_teacher`.
        store: checkpoints of the run.
        tokenizer: tokenizer of the data.
        vocab_size: number of rows of the student's token embedding.

    Raises:
        UserError: if the teacher does not exist, or has another tokenizer or vocabulary.
    """
    loss = config.loss
    if not isinstance(loss, DistillationConfig):
        return None
    path = find_hf_directory(loss.teacher)
    if path is not None:
        model, rows, settings = read_hf_settings(path)
        source = HfCheckpoint(loss.teacher, path, model, rows, Weights(path), settings, "loss.teacher")
        source.check_tokenizer(tokenizer)
        _check_vocabulary(loss.teacher, rows, vocab_size)
        return Teacher(_bind_model(source, model), {})
    rows, saved_tokenizer = read_vocabulary(loss.teacher)
    if saved_tokenizer.identity() != tokenizer.identity():
        raise UserError(
            f"loss.teacher: {loss.teacher} was made for another tokenizer than data.tokenizer, so its predictions are "
            f"about other tokens; name a teacher with the same tokenizer, or write data.tokenizer: the teacher's"
        )
    _check_vocabulary(loss.teacher, rows, vocab_size)
    directory, step = find_checkpoints(loss.teacher)
    # Pins the step, because the newest checkpoint of the teacher changes if its run continues.
    pinned = read_pinned_step(store, _TEACHER_STEP)
    newest = max(list_steps(directory), default=None) if step is None else step
    checkpoint = BaseCheckpoint(directory, pinned or newest, key="loss.teacher", fact=_TEACHER_STEP)
    return Teacher(checkpoint.load, checkpoint.facts)


def _bind_model(source: HfCheckpoint, model: DecoderConfig) -> _Loader:
    return lambda shapes, shardings: source.load(model, shapes, shardings)


def _check_vocabulary(name: str, rows: int, vocab_size: int) -> None:
    if rows != vocab_size:
        raise UserError(
            f"loss.teacher: {name} predicts {rows:,} tokens, but the student has {vocab_size:,} rows for them; name a "
            f"teacher with the same vocabulary"
        )
