"""The tokens of a batch with the highest losses, in their context.

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

_BEFORE, _AFTER = 24, 8
"""Tokens of context that are shown before and after a target."""


class HardToken(NamedTuple):
    """A target with its loss, in its context."""

    row: int
    """The row of the batch, from 0."""
    position: int
    """The position in the row, from 0: that of the input which the target follows."""
    loss: float
    """-log p, in nats."""
    token: str
    before: str
    """The inputs up to there, of the same document."""
    after: str


def token_losses(setup: TrainingSetup, config: RunConfig, state: TrainState, batch: Batch) -> np.ndarray:
    """Computes -log p(target) in nats, float32 [B, S], without dropout; NaN for a target that has no part in the loss.

    Runs in pieces of a microbatch, whose memory is known to suffice.
    """

    def losses(params: dict[str, jax.Array], rows: Batch) -> jax.Array:
        model = setup.model.merge(params)
        h_BSD, _ = model.hidden_of(rows, dtype=config.trainer.mp.compute_dtype)
        h_ND, targets_N = h_BSD.reshape(-1, h_BSD.shape[-1]), jnp.asarray(rows.targets).reshape(-1)
        ones_N = jnp.ones(targets_N.shape, jnp.float32)
        # The loss is linear in the weights of the tokens, so its gradient with respect to them is the loss of each.
        # This takes the same blockwise code as training does, instead of logits for all tokens at once.
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


def hardest(losses: np.ndarray, batch: Batch, tokenizer: Tokenizer, count: int) -> list[HardToken]:
    """The `count` tokens with the highest losses, those that are not finite first.

    Args:
        losses: float32 [B, S], of `token_losses`.
        batch: the batch that they belong to.
        tokenizer: turns ids back into text.
        count: the number of tokens.
    """
    counts = np.asarray(batch.weights) > 0
    ranks = np.where(counts, np.where(np.isfinite(losses), losses, np.inf), -np.inf)
    # Stable, so that tokens of equal loss come in the order of the batch.
    order = np.argsort(-ranks, axis=None, kind="stable")[: min(count, int(counts.sum()))]
    found = []
    for row, position in zip(*np.unravel_index(order, losses.shape), strict=True):
        tokens, targets, segments = (np.asarray(x)[row] for x in (batch.tokens, batch.targets, batch.segments))
        # Packed rows hold several documents; the context ends at the border of its own.
        inside = segments == segments[position]
        at = np.arange(len(tokens))
        # The target follows the input at its position: inputs up to there come before it, later targets after it.
        before = tokens[inside & (at > position - _BEFORE) & (at <= position)].tolist()
        after = targets[inside & (at > position) & (at <= position + _AFTER)].tolist()
        texts = [tokenizer.decode(ids) for ids in ([int(targets[position])], before, after)]
        found.append(HardToken(int(row), int(position), float(losses[row, position]), *texts))
    return found
