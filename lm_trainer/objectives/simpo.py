"""Simple preference optimization, which needs no reference model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from lm_trainer.objectives.base import PairSums, PreferenceLossConfig, pair_metrics, smoothed_logistic

if TYPE_CHECKING:
    import jax


class SimpoConfig(PreferenceLossConfig):
    """SimPO (Meng et al. 2024, arXiv 2405.14734, equation 6): -log sigmoid(beta * difference - gamma).

    The difference is the chosen answer's mean log probability per token minus the rejected answer's, in nats.
    """

    type: Literal["simpo"] = "simpo"
    beta: PositiveFloat = 2.0
    """Factor of the mean log probabilities. The paper uses 2 to 10."""
    gamma: NonNegativeFloat = 1.0
    """Margin of the rewards. The paper uses 0.3 to 1.6, and recommends about half of beta."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs that are assumed to be labelled the wrong way round."""

    def losses(self, sums: PairSums) -> jax.Array:
        """Returns the loss of each pair, in nats."""
        chosen, rejected = sums.averages
        return smoothed_logistic(self.beta * (chosen - rejected) - self.gamma, self.label_smoothing)

    def metrics(self, sums: PairSums) -> dict[str, jax.Array]:
        """Returns the metrics of pairs; a reward is beta times the mean log probability per token."""
        chosen, rejected = sums.averages
        return pair_metrics((self.beta * chosen, self.beta * rejected), sums)
