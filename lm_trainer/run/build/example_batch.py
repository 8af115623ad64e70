"""Batches with the same arrays as the batches of a run, for compiling and measuring its step without data."""

from __future__ import annotations

import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.objectives.distillation_loss import DistillationLoss
from lm_trainer.objectives.preference import PreferenceLoss
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.model import loss_function
from lm_trainer.run.config.run_config import RunConfig


def example_batch(config: RunConfig, rows: int, vocab_size: int, seed: int = 0) -> Batch:
    """Makes a batch of random tokens for the loss of a run; precomputed values of a frozen model are zeros."""
    batch = random_batch(rows, config.model.seq_len, vocab_size, config.model.features_shape, seed)
    loss = loss_function(config)
    if not (config.loss.precomputes and isinstance(loss, DistillationLoss | PreferenceLoss)):
        return batch
    fields = loss.frozen_shapes(config.model.seq_len, vocab_size)
    return batch._replace(frozen={name: np.zeros((rows, *shape), dtype) for name, (shape, dtype) in fields.items()})
