"""Finds the tokens of a batch with the highest losses, and shows them in context.

Shape letters: B is the number of rows, S the number of positions in a row, N the number of tokens (B x S), and D the
hidden dimension.
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
"""Maximum number of context tokens before and after a target token."""


class HardToken(NamedTuple):
    """A target token with its loss and context."""

    row: int
    """Row of the batch, counted from 0."""
    position: int
    """Position in the row, counted from 0, of the input token that precedes the target."""
    loss: float
    """Loss of the target, -log p in nats."""
    token: str
    before: str
    """Text of the input tokens up to and including this position, in the same document."""
    after: str


def compute_token_losses(setup: TrainingSetup, config: RunConfig, state: TrainState, batch: Batch) -> np.ndarray:
    """Computes -log p(target) in nats without dropout, as float32 [B, S].

    Targets that do not count in the loss are NaN.

    Runs one microbatch at a time, because a microbatch is known to fit into memory.
    """

    def losses(params: dict[str, jax.Array], rows: Batch) -> jax.Array:
        model = setup.model.merge(params)
        h_BSD, _ = model.batch_hidden_and_stats(rows, dtype=config.trainer.mp.compute_dtype)
        h_ND, targets_N = h_BSD.reshape(-1, h_BSD.shape[-1]), jnp.asarray(rows.targets).reshape(-1)
        ones_N = jnp.ones(targets_N.shape, jnp.float32)
        # The loss is linear in the token weights, so its gradient with respect to them is the loss of each token. This
        # uses the same blockwise code as training, which never computes the logits of all tokens at once.
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
    """Returns the `count` tokens with the highest losses in descending order, with non-finite losses first.

    Args:
        losses: float32 [B, S], from `compute_token_losses`.
        batch: the batch for which the losses were computed.
        tokenizer: tokenizer that decodes token IDs to text.
        count: maximum number of tokens.
    """
    counts = np.asarray(batch.weights) > 0
    ranks = np.where(counts, np.where(np.isfinite(losses), losses, np.inf), -np.inf)
    # The sort is stable, so tokens with equal losses keep their order in the batch.
    order = np.argsort(-ranks, axis=None, kind="stable")[: min(count, int(counts.sum()))]
    hard_tokens = []
    for row, position in zip(*np.unravel_index(order, losses.shape), strict=True):
        tokens, targets, segments = (np.asarray(x)[row] for x in (batch.tokens, batch.targets, batch.segments))
        # A packed row contains several documents. The context is limited to the document of the target.
        inside = segments == segments[position]
        positions = np.arange(len(tokens))
        # The target comes after the input at its position. The preceding tokens are therefore the inputs up to and
        # including this position, and the following tokens are the targets at later positions.
        preceding = tokens[inside & (positions > position - _CONTEXT_BEFORE) & (positions <= position)].tolist()
        following = targets[inside & (positions > position) & (positions <= position + _CONTEXT_AFTER)].tolist()
        texts = [tokenizer.decode(ids) for ids in ([int(targets[position])], preceding, following)]
        hard_tokens.append(HardToken(int(row), int(position), float(losses[row, position]), *texts))
    return hard_tokens
