"""Rows of a run's token embedding, as far as this machine can tell before there is data."""

from __future__ import annotations

from typing import Any, NamedTuple

from lm_trainer.data.tokenizer import Pretrained
from lm_trainer.data.tokenizer.hf import load_local
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.weights.pretrained import stored_vocabulary
from lm_trainer.run.weights.saved_model import read_vocabulary

GPT2_VOCABULARY = 50_257
"""Assumed where only the hub would tell."""


class Vocabulary(NamedTuple):
    """Rows of the token embedding."""

    rows: int
    note: str | None = None
    """The reason why these were assumed; None where they are known."""


def find_vocabulary(config: RunConfig) -> Vocabulary:
    """The rows that `lmt train` would give the model: of the checkpoint to start from, else of the tokenizer.

    A tokenizer that was never downloaded is not asked for: a run can be planned without network.

    Raises:
        UserError: when a checkpoint or a tokenizer that is named by its path is not there, or is damaged.
        MachineError: when the checkpoint is on the hub, which cannot be reached.
    """
    if config.initialize_from_hf:
        return Vocabulary(stored_vocabulary(config))
    if config.trainer.initialize_from is not None:
        return Vocabulary(read_vocabulary(config.trainer.initialize_from)[0])
    tokenizer: Any = config.data.tokenizer_config
    if not isinstance(tokenizer, Pretrained):
        return Vocabulary(tokenizer.vocab_size)
    found = load_local(tokenizer)
    if found is not None:
        return Vocabulary(found.vocab_size)
    note = (
        f"data.tokenizer {tokenizer.name} is not on this machine; a vocabulary of {GPT2_VOCABULARY:,} is assumed, that "
        f"of GPT-2"
    )
    return Vocabulary(GPT2_VOCABULARY, note)
