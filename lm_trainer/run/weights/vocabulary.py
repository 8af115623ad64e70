"""Rows of a run's token embedding, as far as known on this machine before opening the data."""

from __future__ import annotations

from typing import Any, NamedTuple

from lm_trainer.data.tokenizer import Pretrained
from lm_trainer.data.tokenizer.hf import load_local
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.weights.pretrained import read_checkpoint_vocab_size
from lm_trainer.run.weights.saved_model import read_vocabulary

GPT2_VOCABULARY = 50_257
"""Assumed if the vocabulary is only available on the hub."""


class Vocabulary(NamedTuple):
    """Rows of the token embedding."""

    rows: int
    note: str | None = None
    """The reason for an assumed value; None if it is known."""


def find_vocabulary(config: RunConfig) -> Vocabulary:
    """Returns the rows of the embedding in `lmt train`: from the initial checkpoint, else from the tokenizer.

    A tokenizer is not downloaded for this, so that a run can be planned without a network.

    Raises:
        UserError: if a checkpoint or a tokenizer given by its path is missing or damaged.
        MachineError: if the checkpoint is on the hub and the hub is unreachable.
    """
    if config.initialize_from_hf:
        return Vocabulary(read_checkpoint_vocab_size(config))
    if config.trainer.initialize_from is not None:
        return Vocabulary(read_vocabulary(config.trainer.initialize_from)[0])
    tokenizer: Any = config.data.tokenizer_config
    if not isinstance(tokenizer, Pretrained):
        return Vocabulary(tokenizer.vocab_size)
    local = load_local(tokenizer)
    if local is not None:
        return Vocabulary(local.vocab_size)
    note = (
        f"data.tokenizer {tokenizer.name} is not on this machine; a vocabulary of {GPT2_VOCABULARY:,} is assumed, that "
        f"of GPT-2"
    )
    return Vocabulary(GPT2_VOCABULARY, note)
