"""Odds ratio preference optimization, which needs no reference model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat

from lm_trainer.objectives.base import PairSums, PreferenceLossConfig, pair_metrics

if TYPE_CHECKING:
    import jax

_HIGHEST = -1e-6
"""Highest mean log probability for which odds are computed: the odds of a certain answer are infinite."""


class OrpoConfig(PreferenceLossConfig):
    """ORPO (Hong et al. 2024, arXiv 2403.07691, equations 4, 6 and 7): supervised fine-tuning on the chosen answer,
    plus -beta * log sigmoid(log odds ratio).

    The first term is the mean -log pi per token of the chosen answer, in nats. The odds of an answer are p / (1 - p), p
    the exponential of its mean log probability per token.
    """

    type: Literal["orpo"] = "orpo"
    beta: PositiveFloat = 0.1
    """Weight of the odds ratio, lambda in the paper."""

    def losses(self, sums: PairSums) -> jax.Array:
        """Returns the loss of each pair, in nats."""
        import jax

        return -sums.averages[0] - self.beta * jax.nn.log_sigmoid(_log_odds_ratio(sums))

    def metrics(self, sums: PairSums) -> dict[str, jax.Array]:
        """Returns the metrics of pairs; a reward is beta times the mean log probability per token."""
        chosen, rejected = sums.averages
        rewards = pair_metrics((self.beta * chosen, self.beta * rejected), sums)
        return {**rewards, "nll": -chosen, "log_odds_ratio": _log_odds_ratio(sums)}


def _log_odds_ratio(sums: PairSums) -> jax.Array:
    import jax.numpy as jnp

    chosen, rejected = (jnp.minimum(average, _HIGHEST) for average in sums.averages)
    return (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))


def _log1mexp(x: jax.Array) -> jax.Array:
    """Returns log(1 - exp(x)) for x < 0 without cancellation.

    Source: M. Maechler, "Accurately computing log(1 - exp(-|a|))" (2012).
    """
    import jax.numpy as jnp

    near = x > -math.log(2.0)
    # Each branch gets an argument at which its derivative is finite, because the gradient of the other one, times 0,
    # would be NaN if it overflowed.
    of_near = jnp.log(-jnp.expm1(jnp.where(near, x, -0.5)))
    of_far = jnp.log1p(-jnp.exp(jnp.where(near, -1.0, x)))
    return jnp.where(near, of_near, of_far)
