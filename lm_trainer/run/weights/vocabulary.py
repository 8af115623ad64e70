"""Number of rows of the token embedding of a run, as far as it is known before the data is opened."""

from __future__ import annotations

from typing import Any, NamedTuple

from lm_trainer.data.tokenizer import Pretrained
from lm_trainer.data.tokenizer.hf import load_local
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.weights.pretrained import read_checkpoint_vocab_size
from lm_trainer.run.weights.saved_model import read_vocabulary

GPT2_VOCABULARY = 50_257
"""Vocabulary size that is assumed if the tokenizer is only available on the hub."""


class Vocabulary(NamedTuple):
    """Number of rows of the token embedding, which may be an assumption."""

    rows: int
    note: str | None = None
    """Reason why the number is assumed; None if it is known."""


def find_vocabulary(config: RunConfig) -> Vocabulary:
    """Returns the number of embedding rows that `lmt train` would use, from the initial checkpoint or the tokenizer.

    The tokenizer is not downloaded for this purpose, so that a run can be planned without a network connection.

    Raises:
        UserError: if a checkpoint or tokenizer that is given as a path is missing or damaged.
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
