"""The equations of the papers, written once more, for NumPy (in float64) or JAX (to differentiate them)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lm_trainer.objectives import AnyLoss, DpoConfig, IpoConfig, KtoConfig, OrpoConfig, SimpoConfig


class Logps(NamedTuple):
    """Sums of log probabilities of answers [P], numbers of tokens, and the same sums under the reference."""

    chosen: Any
    rejected: Any
    chosen_tokens: Any
    rejected_tokens: Any
    reference_chosen: Any
    reference_rejected: Any


def sigmoid(x: Any, xp: Any) -> Any:
    return 1 / (1 + xp.exp(-x))


def loss_of_pairs(loss: AnyLoss, x: Logps, xp: Any = np) -> Any:
    """The loss of each pair by the paper's equation."""
    log_sigmoid = lambda z: xp.log(sigmoid(z, xp))  # noqa: E731
    ratios = x.chosen - x.reference_chosen, x.rejected - x.reference_rejected
    means = x.chosen / x.chosen_tokens, x.rejected / x.rejected_tokens
    match loss:
        case DpoConfig(beta=beta, label_smoothing=share):
            z = beta * (ratios[0] - ratios[1])
            added = -loss.rpo_alpha * means[0]
            return -(1 - share) * log_sigmoid(z) - share * log_sigmoid(-z) + added
        case IpoConfig(beta=beta):
            lengths = (x.chosen_tokens, x.rejected_tokens) if loss.length_normalization else (1, 1)
            return (ratios[0] / lengths[0] - ratios[1] / lengths[1] - 1 / (2 * beta)) ** 2
        case SimpoConfig(beta=beta, gamma=gamma, label_smoothing=share):
            z = beta * means[0] - beta * means[1] - gamma
            return -(1 - share) * log_sigmoid(z) - share * log_sigmoid(-z)
        case OrpoConfig(beta=beta):
            odds = [xp.exp(mean) / (1 - xp.exp(mean)) for mean in means]
            return -means[0] - beta * log_sigmoid(xp.log(odds[0] / odds[1]))
    raise AssertionError(loss)


def loss_of_examples(loss: KtoConfig, ratios: Any, desirable: Any, drift: Any, xp: Any = np) -> Any:
    """The loss of each labelled example by the paper's equation."""
    z = xp.maximum(drift, 0)
    wanted = loss.desirable_weight * (1 - sigmoid(loss.beta * (ratios - z), xp))
    unwanted = loss.undesirable_weight * (1 - sigmoid(loss.beta * (z - ratios), xp))
    return xp.where(desirable, wanted, unwanted)
