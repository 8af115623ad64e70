"""The default number of microbatches (`trainer.elastic_shards`), a function of the batch but not of the devices."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lm_trainer.core.piecewise import to_piecewise

if TYPE_CHECKING:
    from lm_trainer.run.config.trainer_config import TrainerConfig

TOKENS_PER_MICROBATCH = 8192
MIN_MICROBATCHES = 8
MIN_TOKENS_TO_SPLIT = 2048
"""Batches with fewer tokens are one microbatch: shares of a few hundred tokens cost a device more than they save."""


def default_microbatches(tokens: int) -> int:
    """Returns the number of microbatches of a batch with `tokens` tokens, a power of two.

    It makes microbatches of about `TOKENS_PER_MICROBATCH` tokens, but at least `MIN_MICROBATCHES` of them; one in total
    if there are fewer than `MIN_TOKENS_TO_SPLIT` tokens. Changing these constants would change the bits of new runs.
    """
    if tokens < MIN_TOKENS_TO_SPLIT:
        return 1
    return 1 << round(math.log2(max(MIN_MICROBATCHES, tokens / TOKENS_PER_MICROBATCH)))


def follows_from_batch(trainer: TrainerConfig) -> bool:
    """Returns True if `elastic_shards` is unset and determines the microbatches."""
    return "elastic_shards" not in trainer.model_fields_set and trainer.per_device_parallelism == -1


def largest_shards(trainer: TrainerConfig, limit: int) -> int:
    """Returns the largest power of two up to `limit`, a power of two, of microbatches into which every batch splits."""
    batches = to_piecewise(trainer.train_batch_size).values
    if trainer.allow_nondivisible_batch_size:
        return min(limit, 1 << (min(batches).bit_length() - 1))
    return math.gcd(limit, *batches)


def set_default_shards(trainer: TrainerConfig, limit: int) -> None:
    """Sets `elastic_shards`, if it follows from the batch, to `largest_shards`.

    The key does not count as set afterwards.

    Args:
        trainer: the section; it is changed.
        limit: maximum number of microbatches, a power of two.
    """
    if follows_from_batch(trainer):
        # The section is frozen; a plain assignment would also count as setting the key.
        object.__setattr__(trainer, "elastic_shards", largest_shards(trainer, limit))


def with_default_shards(trainer: TrainerConfig, tokens_per_row: int) -> TrainerConfig:
    """Returns the section with `elastic_shards`, if it follows from the batch, set for rows of `tokens_per_row` tokens.

    The smallest batch of a schedule determines it. Frames of audio count as tokens.
    """
    if not follows_from_batch(trainer):
        return trainer
    tokens = min(to_piecewise(trainer.train_batch_size).values) * tokens_per_row
    trainer = trainer.model_copy()
    set_default_shards(trainer, default_microbatches(tokens))
    return trainer
