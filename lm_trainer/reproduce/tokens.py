"""The tokens of a batch with the highest losses, in context.

Shape letters: B rows, S positions in a row, N tokens (B x S), D hidden dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.data.tokenizer import Tokenizer
from lm_trainer.nn.loss import weighted_nll
from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.step.state.train_state import TrainState

_CONTEXT_BEFORE, _CONTEXT_AFTER = 24, 8
"""Number of context tokens before and after a target."""


class HardToken(NamedTuple):
    """A target token with its loss and context."""

    row: int
    """The row of the batch, from 0."""
    position: int
    """The position in the row, from 0, of the input that precedes the target."""
    loss: float
    """-log p, in nats."""
    token: str
    before: str
    """The inputs up to this position, in the same document."""
    after: str


def compute_token_losses(setup: TrainingSetup, config: RunConfig, state: TrainState, batch: Batch) -> np.ndarray:
    """Computes -log p(target) in nats, float32 [B, S], without dropout; NaN for a target outside the loss.

    Runs one microbatch at a time, which is known to fit into memory.
    """

    def losses(params: dict[str, jax.Array], rows: Batch) -> jax.Array:
        model = setup.model.merge(params)
        h_BSD, _ = model.batch_hidden_and_stats(rows, dtype=config.trainer.mp.compute_dtype)
        h_ND, targets_N = h_BSD.reshape(-1, h_BSD.shape[-1]), jnp.asarray(rows.targets).reshape(-1)
        ones_N = jnp.ones(targets_N.shape, jnp.float32)
        # The loss is linear in the token weights, so its gradient with respect to them is the loss per token. This uses
        # the same blockwise code as training, instead of logits for all tokens at once.
        slopes: Any = jax.grad(weighted_nll, argnums=3)
        head, block_size = model.spec.head, config.model.cross_entropy_block_size
        return slopes(h_ND, model.head_weight(), targets_N, ones_N, block_size, head.softcap).reshape(h_BSD.shape[:2])

    compiled, params = jax.jit(losses), {**state.frozen, **state.params}
    size = setup.step.plans.at(state.step).rows
    parts = []
    for start in range(0, len(batch.tokens), size):
        rows = jax.tree.map(lambda x, first=start: np.asarray(x)[first : first + size], batch)
        parts.append(np.asarray(compiled(params, rows)))
    return np.where(np.asarray(batch.weights) > 0, np.concatenate(parts), np.nan)


def find_hardest_tokens(losses: np.ndarray, batch: Batch, tokenizer: Tokenizer, count: int) -> list[HardToken]:
    """The `count` tokens with the highest losses, non-finite losses first.

    Args:
        losses: float32 [B, S], from `compute_token_losses`.
        batch: the batch of the losses.
        tokenizer: decodes ids to text.
        count: the number of tokens.
    """
    counts = np.asarray(batch.weights) > 0
    ranks = np.where(counts, np.where(np.isfinite(losses), losses, np.inf), -np.inf)
    # Stable: tokens with equal losses keep the order of the batch.
    order = np.argsort(-ranks, axis=None, kind="stable")[: min(count, int(counts.sum()))]
    hard_tokens = []
    for row, position in zip(*np.unravel_index(order, losses.shape), strict=True):
        tokens, targets, segments = (np.asarray(x)[row] for x in (batch.tokens, batch.targets, batch.segments))
        # Packed rows hold several documents; the context is limited to the target's document.
        inside = segments == segments[position]
        positions = np.arange(len(tokens))
        # The target follows the input at its position: inputs up to this position precede it, later targets follow it.
        preceding = tokens[inside & (positions > position - _CONTEXT_BEFORE) & (positions <= position)].tolist()
        following = targets[inside & (positions > position) & (positions <= position + _CONTEXT_AFTER)].tolist()
        texts = [tokenizer.decode(ids) for ids in ([int(targets[position])], preceding, following)]
        hard_tokens.append(HardToken(int(row), int(position), float(losses[row, position]), *texts))
    return hard_tokens
