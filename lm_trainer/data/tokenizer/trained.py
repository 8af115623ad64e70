"""Byte-level BPE trained on the run's own training text."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from lm_trainer.data.sources import BadRow, Shard
from lm_trainer.data.sources.base import all_text, replace_surrogates
from lm_trainer.data.tokenizer.base import EOS_TOKEN, HfTokenizer, TokenizerConfig


class TrainedBpe(TokenizerConfig):
    """Byte-level BPE with GPT-2's word pattern, trained at first use and kept beside the cache."""

    type: Literal["trained_bpe"] = "trained_bpe"
    vocab_size: int = Field(default=4096, ge=257, le=1 << 20)
    """Tokens of the vocabulary: 256 bytes, one end-of-document token, and merges. Little text may give fewer."""
    sample_bytes: int = Field(default=32 << 20, ge=1 << 10)
    """Train on at most about so many bytes, taken from the start of every shard of the training text."""

    def recipe(self, shards: Sequence[Shard]) -> dict[str, Any]:
        """Lists everything that decides the result."""
        return {
            **self.model_dump(),
            "version": importlib.metadata.version("tokenizers"),
            "shards": [shard.identity() for shard in shards],
        }


def train_bpe(config: TrainedBpe, shards: Sequence[Shard]) -> HfTokenizer:
    """Trains on the documents of `shards`. The same text gives the same tokenizer, whatever the number of threads."""
    # Sorted, since the package gives the alphabet in no fixed order.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[AddedToken(EOS_TOKEN, special=True, normalized=False)],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(shards, config.sample_bytes), trainer)
    return HfTokenizer(tokenizer.to_str(pretty=True), origin="the trained tokenizer")


def _sample(shards: Sequence[Shard], num_bytes: int) -> Iterator[str]:
    """Yields the first rows of every shard, bad ones left out: each shard gives its share of `num_bytes`."""
    for index, shard in enumerate(shards):
        # Differences of rounded sums: the shares add up to `num_bytes`, whatever the number of shards.
        budget = num_bytes * (index + 1) // len(shards) - num_bytes * index // len(shards)
        for row in shard.rows():
            if isinstance(row, BadRow):
                continue
            text = replace_surrogates(all_text(row))[:budget]
            budget -= len(text)
            yield text
            if budget <= 0:
                break
