"""The default number of microbatches (`trainer.elastic_shards`), which depends on the batch but not on the devices."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lm_trainer.core.piecewise import to_piecewise

if TYPE_CHECKING:
    from lm_trainer.run.config.trainer_config import TrainerConfig

TOKENS_PER_MICROBATCH = 8192
MIN_MICROBATCHES = 8
MIN_TOKENS_TO_SPLIT = 2048
"""Batches with fewer tokens are a single microbatch, because splitting them further would cost more than it saves."""


def default_microbatches(tokens: int) -> int:
    """Returns the number of microbatches of a batch with `tokens` tokens, a power of two.

    Microbatches have about `TOKENS_PER_MICROBATCH` tokens, but there are at least `MIN_MICROBATCHES` of them. A batch
    with fewer than `MIN_TOKENS_TO_SPLIT` tokens is a single microbatch. Changing these constants would change the bits
    of new runs.
    """
    if tokens < MIN_TOKENS_TO_SPLIT:
        return 1
    return 1 << round(math.log2(max(MIN_MICROBATCHES, tokens / TOKENS_PER_MICROBATCH)))


def follows_from_batch(trainer: TrainerConfig) -> bool:
    """Returns True if `elastic_shards` is not set, but determines the microbatches."""
    return "elastic_shards" not in trainer.model_fields_set and trainer.per_device_parallelism == -1


def largest_shards(trainer: TrainerConfig, limit: int) -> int:
    """Returns the largest number of microbatches into which every batch can be split.

    Only powers of two up to and including `limit`, also a power of two, are considered.
    """
    batches = to_piecewise(trainer.train_batch_size).values
    if trainer.allow_nondivisible_batch_size:
        return min(limit, 1 << (min(batches).bit_length() - 1))
    return math.gcd(limit, *batches)


def set_default_shards(trainer: TrainerConfig, limit: int) -> None:
    """Sets `elastic_shards` to the result of `largest_shards`, unless the user has set it.

    The key still counts as not set afterwards.

    Args:
        trainer: the trainer section, which is modified.
        limit: maximum number of microbatches, a power of two.
    """
    if follows_from_batch(trainer):
        # The section is frozen, and a plain assignment would count as setting the key.
        object.__setattr__(trainer, "elastic_shards", largest_shards(trainer, limit))


def with_default_shards(trainer: TrainerConfig, tokens_per_row: int) -> TrainerConfig:
    """Returns the section with the default of `elastic_shards` for rows with `tokens_per_row` tokens.

    The smallest batch in a schedule determines the default. Audio frames count as tokens.
    """
    if not follows_from_batch(trainer):
        return trainer
    tokens = min(to_piecewise(trainer.train_batch_size).values) * tokens_per_row
    limit = default_microbatches(tokens)
    if largest_shards(trainer, limit) == trainer.elastic_shards:
        # A copy would resolve the section once more.
        return trainer
    trainer = trainer.model_copy()
    set_default_shards(trainer, limit)
    return trainer
