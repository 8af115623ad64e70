"""Byte-level BPE that is trained on the training text of the run."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field

from lm_trainer.data.sources import BadRow, Shard
from lm_trainer.data.sources.base import full_text, replace_surrogates
from lm_trainer.data.tokenizer.base import EOS_TOKEN, HfTokenizer, TokenizerConfig


class TrainedBpe(TokenizerConfig):
    """Byte-level BPE with GPT-2's word pattern. It is trained at first use and stored with the cache."""

    type: Literal["trained_bpe"] = "trained_bpe"
    vocab_size: int = Field(default=4096, ge=257, le=1 << 20)
    """Vocabulary size, which includes 256 bytes, one end-of-document token, and merges. A small text may give fewer."""
    sample_bytes: int = Field(default=32 << 20, ge=1 << 10)
    """Approximate maximum number of bytes to train on, which are taken from the start of every training shard."""

    def recipe(self, shards: Sequence[Shard]) -> dict[str, object]:
        """Returns everything that determines the trained tokenizer."""
        return {
            **self.model_dump(),
            "version": importlib.metadata.version("tokenizers"),
            "shards": [shard.identity() for shard in shards],
        }


def train_bpe(config: TrainedBpe, shards: Sequence[Shard]) -> HfTokenizer:
    """Trains a tokenizer on the documents of `shards`. It depends only on the text, not on the number of threads."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    # Sorted, since the package returns the alphabet in no fixed order.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[AddedToken(EOS_TOKEN, special=True, normalized=False)],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample_rows(shards, config.sample_bytes), trainer)
    return HfTokenizer(tokenizer.to_str(pretty=True), origin="the trained tokenizer")


def _sample_rows(shards: Sequence[Shard], num_bytes: int) -> Iterator[str]:
    """Yields the first good rows of every shard. Each shard contributes an equal share of `num_bytes`."""
    for index, shard in enumerate(shards):
        # Differences of rounded sums, so that the shares add up to exactly `num_bytes`.
        budget = num_bytes * (index + 1) // len(shards) - num_bytes * index // len(shards)
        for row in shard.rows():
            if isinstance(row, BadRow):
                continue
            text = replace_surrogates(full_text(row))[:budget]
            budget -= len(text)
            yield text
            if budget <= 0:
                break
