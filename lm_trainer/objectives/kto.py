"""Kahneman-Tversky optimization, for single answers that are labelled as desirable or undesirable."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat

from lm_trainer.core.data_content import DataContent
from lm_trainer.objectives.base import PairSums, ReferenceLossConfig

if TYPE_CHECKING:
    import jax


class KtoConfig(ReferenceLossConfig):
    """KTO (Ethayarajh et al. 2024, arXiv 2402.01306, equations 7 and 8): w (1 - sigmoid(+-beta * (log ratio - z))).

    The sign is + for desirable answers and - for others. A log ratio is log(pi / pi_ref) of an answer, in nats, summed
    over its tokens. The reference point z is an estimate of KL(pi | pi_ref), in nats: the mean log ratio of the answers
    in the same training row when each is given to another prompt of the row, or 0 if that is negative. No gradient
    flows through it. A row is never divided, so the loss does not depend on microbatches and devices.
    """

    type: Literal["kto"] = "kto"
    content: ClassVar[DataContent] = "examples"
    compares_mismatched: ClassVar[bool] = True
    # The policy runs on mismatched answers too, before its loss is known.
    has_stages: ClassVar[bool] = False
    # Both models on the mismatched answers, and the reference.
    extra_forward_passes: ClassVar[int] = 1
    frozen_forward_passes: ClassVar[int] = 2
    beta: PositiveFloat = 0.1
    """Factor of the log ratios. A smaller value lets the model move further from the reference."""
    desirable_weight: NonNegativeFloat = 1.0
    """Weight w of desirable answers. The paper recommends weights for which (weight * number of answers) is 1 to 4/3
    times as large for one label as for the other."""
    undesirable_weight: NonNegativeFloat = 1.0
    """Weight w of undesirable answers."""

    def losses(self, sums: PairSums) -> jax.Array:
        """Returns the loss of each example, from 0 to its weight."""
        import jax
        import jax.numpy as jnp

        desirable = sums.chosen_tokens > 0
        weight = jnp.where(desirable, self.desirable_weight, self.undesirable_weight)
        return weight * (1.0 - jax.nn.sigmoid(self._signed_reward(sums)))

    def metrics(self, sums: PairSums) -> dict[str, jax.Array]:
        """Returns the metrics of examples.

        `rewards/margin` is the distance of the reward from the reference point, counted as positive on the side of the
        label, and `rewards/accuracy` the share of examples on that side.
        """
        import jax.numpy as jnp

        margin = self._signed_reward(sums)
        return {
            "rewards/margin": margin,
            "rewards/accuracy": (margin > 0).astype(margin.dtype),
            "desirable": (sums.chosen_tokens > 0).astype(margin.dtype),
            "kl": jnp.broadcast_to(_reference_point(sums), margin.shape),
        }

    def _signed_reward(self, sums: PairSums) -> jax.Array:
        import jax.numpy as jnp

        # One of the two answers does not exist, and has a log ratio of 0.
        chosen, rejected = sums.log_ratios
        reward = self.beta * (chosen + rejected - _reference_point(sums))
        return jnp.where(sums.chosen_tokens > 0, reward, -reward)


def _reference_point(sums: PairSums) -> jax.Array:
    import jax
    import jax.numpy as jnp

    assert sums.drift is not None
    return jnp.maximum(jax.lax.stop_gradient(sums.drift), 0.0)
