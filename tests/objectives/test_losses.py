"""Preference losses as functions of sums of log probabilities: the papers' equations, and finite where they must be."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from lm_trainer.objectives import (
    DpoConfig,
    IpoConfig,
    KtoConfig,
    OrpoConfig,
    PairSums,
    PreferenceLossConfig,
    SimpoConfig,
)
from tests.objectives.formulas import Logps, loss_of_examples, loss_of_pairs

PAIR_LOSSES = [
    DpoConfig(),
    DpoConfig(beta=0.5, label_smoothing=0.2, rpo_alpha=0.7),
    IpoConfig(beta=0.3),
    IpoConfig(length_normalization=False),
    SimpoConfig(),
    SimpoConfig(beta=5.0, gamma=0.4, label_smoothing=0.1),
    OrpoConfig(),
    OrpoConfig(beta=1.5),
]


def random_logps(count: int, seed: int = 0) -> Logps:
    """Log probabilities of answers of 1 to 40 tokens, of a policy that has moved some way from its reference."""
    rng = np.random.default_rng(seed)
    lengths = [rng.integers(1, 41, count).astype(np.float64) for _ in range(2)]
    logps = [-rng.gamma(2.0, 0.7 * length) - 1e-3 for length in lengths]
    reference = [x + rng.normal(0, 2, count) for x in logps]
    return Logps(*logps, *lengths, *reference)


def in_float32(x: Logps) -> PairSums:
    return PairSums(*(jnp.asarray(part, jnp.float32) for part in x))


@pytest.mark.parametrize("loss", PAIR_LOSSES, ids=lambda loss: f"{loss.type}-{len(loss.changed_fields)}")
def test_pairs_have_the_loss_of_the_paper(loss: PreferenceLossConfig) -> None:
    x = random_logps(64)
    losses = jax.jit(loss.losses)(in_float32(x))
    np.testing.assert_allclose(losses, loss_of_pairs(loss, x), rtol=1e-5, atol=1e-5)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("drift", [0.4, -0.4])
def test_examples_have_the_loss_of_the_paper(drift: float) -> None:
    x, loss = random_logps(64), KtoConfig(beta=0.3, desirable_weight=0.8, undesirable_weight=1.3)
    desirable = np.arange(64) % 3 == 0
    sides = [np.where(desirable, x.chosen, 0), np.where(desirable, 0, x.chosen)]
    lengths = [np.where(desirable, x.chosen_tokens, 0), np.where(desirable, 0, x.chosen_tokens)]
    reference = [np.where(desirable, x.reference_chosen, 0), np.where(desirable, 0, x.reference_chosen)]
    sums = in_float32(Logps(*sides, *lengths, *reference))._replace(drift=jnp.float32(drift))
    expected = loss_of_examples(loss, x.chosen - x.reference_chosen, desirable, drift)
    np.testing.assert_allclose(loss.losses(sums), expected, rtol=1e-5, atol=1e-5)
    metrics = loss.metrics(sums)
    np.testing.assert_allclose(metrics["kl"], np.full(64, max(drift, 0)), rtol=1e-6)
    np.testing.assert_array_equal(metrics["desirable"], desirable)


def test_no_gradient_flows_through_the_reference_point() -> None:
    sums = in_float32(random_logps(8))
    total = lambda drift: jnp.sum(KtoConfig().losses(sums._replace(drift=drift)))  # noqa: E731
    assert jax.grad(total)(jnp.float32(0.5)) == 0


@pytest.mark.parametrize("loss", [*PAIR_LOSSES, KtoConfig()], ids=lambda loss: f"{loss.type}")
@pytest.mark.parametrize("scale", [0.0, 1e-7, 1e4])
def test_extreme_probabilities_have_finite_losses_and_gradients(loss: PreferenceLossConfig, scale: float) -> None:
    parts = [jnp.float32(-scale), jnp.float32(-3.0)]
    for chosen, rejected in (parts, parts[::-1]):

        def total(chosen: jax.Array, rejected: jax.Array) -> jax.Array:
            others = map(jnp.float32, (2, 5, -1, -2, 0))
            return loss.losses(PairSums(chosen, rejected, *others))

        value, slopes = jax.value_and_grad(total, argnums=(0, 1))(chosen, rejected)
        assert np.isfinite([value, *slopes]).all()


def test_rewards_margins_and_accuracy_are_those_of_the_pairs() -> None:
    x = random_logps(32)
    metrics = DpoConfig(beta=0.5).metrics(in_float32(x))
    chosen, rejected = 0.5 * (x.chosen - x.reference_chosen), 0.5 * (x.rejected - x.reference_rejected)
    np.testing.assert_allclose(metrics["rewards/chosen"], chosen, atol=1e-5)
    np.testing.assert_allclose(metrics["rewards/rejected"], rejected, atol=1e-5)
    np.testing.assert_allclose(metrics["rewards/margin"], chosen - rejected, atol=1e-5)
    np.testing.assert_array_equal(metrics["rewards/accuracy"], chosen > rejected)
    of_simpo = SimpoConfig(beta=2.5).metrics(in_float32(x))
    np.testing.assert_allclose(of_simpo["rewards/rejected"], 2.5 * x.rejected / x.rejected_tokens, rtol=1e-5)


def test_impossible_settings_are_refused() -> None:
    for values in ({"beta": 0}, {"label_smoothing": 0.5}, {"rpo_alpha": -1}):
        with pytest.raises(ValidationError):
            DpoConfig(**values)
