"""The weights of a separate reference model, which a loss compares the trained model with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import NamedSharding

from lm_trainer.checkpoint.store import CheckpointStore
from lm_trainer.core.errors import UserError
from lm_trainer.data import Tokenizer
from lm_trainer.nn.reference import name_in_reference, policy_params
from lm_trainer.objectives.base import ReferenceLossConfig
from lm_trainer.run.config.loss_checks import has_separate_reference
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.weights.adapters import BaseCheckpoint, find_frozen_checkpoint
from lm_trainer.run.weights.saved_model import read_vocabulary
from lm_trainer.step.state.model_def import ModelDef, Params
from lm_trainer.step.state.train_state import copy_params

_REFERENCE_STEP = "reference_step"
"""Key of the step of the reference's checkpoint in the record of every checkpoint."""


def find_reference(
    config: RunConfig, store: CheckpointStore, tokenizer: Tokenizer, vocab_size: int
) -> BaseCheckpoint | None:
    """Returns the checkpoint of the reference; None if there is no reference, or the reference is the model's start.

    Args:
        config: configuration of the run.
        store: checkpoints of the run.
        tokenizer: tokenizer of the data.
        vocab_size: number of rows of the token embedding of the trained model.

    Raises:
        UserError: if the checkpoint does not exist, its model computes a different function from the model section, or
            it has another tokenizer or vocabulary.
    """
    loss = config.loss
    if not isinstance(loss, ReferenceLossConfig) or loss.reference is None:
        return None
    checkpoint = find_frozen_checkpoint(config, store, loss.reference, "loss.reference", _REFERENCE_STEP)
    rows, saved_tokenizer = read_vocabulary(loss.reference)
    if saved_tokenizer.identity() != tokenizer.identity():
        raise UserError(
            f"loss.reference: {loss.reference} was made for another tokenizer than data.tokenizer, so the log "
            f"probabilities of the two models cannot be compared; name a model with the same tokenizer"
        )
    if rows != vocab_size:
        raise UserError(
            f"loss.reference: {loss.reference} predicts {rows:,} tokens, but the trained model has {vocab_size:,} rows "
            f"for them; name a model with the same vocabulary"
        )
    return checkpoint


def with_reference_weights(model: ModelDef, config: RunConfig, checkpoint: BaseCheckpoint | None) -> ModelDef:
    """Returns the model with a function that also loads the weights of its separate reference, if it has one.

    Args:
        model: the model, with a function that loads its own initial weights.
        config: configuration of the run.
        checkpoint: checkpoint of the reference; None means a copy of the initial weights of the model.

    Raises:
        UserError: if the model has no initial weights to copy.
    """
    if not has_separate_reference(config.loss, config.adapter):
        return model
    load_start = model.load
    if load_start is None:
        raise UserError(
            f"loss: {config.loss.type} needs the weights that training starts from at every start; name them as "
            f"trainer.initialize_from or initialize_from_hf"
        )

    def load(shapes: Mapping[str, Any], shardings: Mapping[str, NamedSharding]) -> Params:
        start = load_start(policy_params(shapes), policy_params(shardings))
        if checkpoint is None:
            # Copied, because a step consumes the memory of the trained weights.
            reference = copy_params(start)
        else:
            reference = checkpoint.load(policy_params(shapes), policy_params(shardings))
        return {**start, **{name_in_reference(name): x for name, x in reference.items()}}

    return dataclasses.replace(model, load=load)
