"""Direct preference optimization."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from lm_trainer.objectives.base import PairSums, ReferenceLossConfig, pair_metrics, smoothed_logistic

if TYPE_CHECKING:
    import jax


class DpoConfig(ReferenceLossConfig):
    """DPO (Rafailov et al. 2023, arXiv 2305.18290, equation 7): -log sigmoid(beta * difference of the log ratios).

    A log ratio is log(pi / pi_ref) of an answer, in nats, summed over its tokens; the difference is the chosen answer's
    minus the rejected answer's.
    """

    type: Literal["dpo"] = "dpo"
    beta: PositiveFloat = 0.1
    """Factor of the log ratios. A smaller value lets the model move further from the reference."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs that are assumed to be labelled the wrong way round ("conservative DPO")."""
    rpo_alpha: NonNegativeFloat = 0.0
    """Weight of an added likelihood of the chosen answer: its mean -log pi per token, in nats (Pang et al. 2024, arXiv
    2404.19733, equation 1). It keeps the chosen answer from becoming less likely."""

    def losses(self, sums: PairSums) -> jax.Array:
        """Returns the loss of each pair, in nats."""
        chosen, rejected = sums.log_ratios
        loss = smoothed_logistic(self.beta * (chosen - rejected), self.label_smoothing)
        return loss if not self.rpo_alpha else loss - self.rpo_alpha * sums.averages[0]

    def metrics(self, sums: PairSums) -> dict[str, jax.Array]:
        """Returns the metrics of pairs; a reward is beta times the log ratio."""
        chosen, rejected = sums.log_ratios
        return pair_metrics((self.beta * chosen, self.beta * rejected), sums)
