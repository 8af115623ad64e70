"""Identity preference optimization."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat

from lm_trainer.objectives.base import PairSums, ReferenceLossConfig, pair_metrics

if TYPE_CHECKING:
    import jax


class IpoConfig(ReferenceLossConfig):
    """IPO (Azar et al. 2023, arXiv 2310.12036, equation 17): (difference of the log ratios - 1 / (2 beta))^2.

    A log ratio is log(pi / pi_ref) of an answer, in nats; the difference is the chosen answer's minus the rejected
    answer's.
    """

    type: Literal["ipo"] = "ipo"
    beta: PositiveFloat = 0.1
    """The tau of the paper: the difference is pulled to 1 / (2 beta)."""
    length_normalization: bool = True
    """Divide each log ratio by the number of tokens of its answer, as the authors of the paper do in their experiments
    and TRL does; false takes the sums of the equation, with which longer answers have larger losses."""

    def losses(self, sums: PairSums) -> jax.Array:
        """Returns the loss of each pair, in nats squared."""
        chosen, rejected = sums.log_ratios
        if self.length_normalization:
            chosen, rejected = chosen / sums.chosen_tokens, rejected / sums.rejected_tokens
        return (chosen - rejected - 1.0 / (2.0 * self.beta)) ** 2

    def metrics(self, sums: PairSums) -> dict[str, jax.Array]:
        """Returns the metrics of pairs; a reward is beta times the summed log ratio."""
        chosen, rejected = sums.log_ratios
        return pair_metrics((self.beta * chosen, self.beta * rejected), sums)
