"""A table of bigrams, its loss and its batches: what a user of `Trainer` brings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lm_trainer.core.batch import Batch
from lm_trainer.core.piecewise import BatchSchedule
from lm_trainer.optim import AdamConfig
from lm_trainer.run.config.trainer_config import TrainerConfig

VOCAB, ROWS, SEQ, STEPS = 7, 8, 5, 6
# With an epsilon that keeps rounding of gradients near zero from being blown up.
OPTIMIZER = AdamConfig(
    learning_rate=0.1, warmup=0, lr_schedule="constant", weight_decay=0.0, max_grad_norm=None, epsilon=1e-2
)


class Bigrams(nnx.Module):
    """The logits of the next token, by the one before, plus a bias."""

    def __init__(self) -> None:
        self.table = nnx.Param(jnp.zeros((VOCAB, VOCAB)))
        self.bias = nnx.Param(jnp.zeros(VOCAB))


def loss(model: Bigrams, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    logits = model.table[...][batch.tokens] + model.bias[None, None, :]
    right = jnp.argmax(logits, -1) == batch.targets
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch.targets[..., None], -1)[..., 0]
    return jnp.sum(nll * batch.weights), jnp.sum(batch.weights), {"accuracy": jnp.sum(right * batch.weights)}


def batch(step: int, rows: int = ROWS) -> Batch:
    tokens = np.random.default_rng(step).integers(0, VOCAB, (rows, SEQ + 1)).astype(np.int32)
    zeros = np.zeros((rows, SEQ), np.int32)
    return Batch(tokens[:, :-1], tokens[:, 1:], np.ones((rows, SEQ), np.float32), zeros, zeros)


class Numbered:
    """Batches by their number, as a data set gives them."""

    def train(
        self, schedule: BatchSchedule, *, rows: Callable[[int], Sequence[int]], first_step: int, num_steps: int
    ) -> Iterator[Batch]:
        for step in range(first_step, first_step + num_steps):
            size = schedule.at(step)
            yield jax.tree.map(lambda x, size=size: x[list(rows(size))], batch(step, size))

    def batches(self, batch_size: int, *, rows: Sequence[int], max_batches: int | None = None) -> list[Batch]:
        return [batch(1000, batch_size)]


def settings(**changes: Any) -> TrainerConfig:
    base: dict[str, Any] = {
        "id": "own",
        "num_train_steps": STEPS,
        "train_batch_size": ROWS,
        "steps_per_eval": 4,
        "tracker": (),
        "elastic_shards": 8,
        "max_devices": 1,
        "checkpointer": {"save_interval": "1h", "keep": [{"every": 3}]},
    }
    return TrainerConfig.model_validate({**base, **changes})
