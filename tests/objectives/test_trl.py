"""Preference losses beside the code of TRL, on the same log probabilities of answers of unequal lengths, with padding.

TRL is no dependency: pip install --no-deps trl accelerate datasets dill multiprocess pandas xxhash
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from lm_trainer.objectives import DpoConfig, IpoConfig, KtoConfig, OrpoConfig, PairSums, SimpoConfig

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch", reason="compares with TRL on torch, which is not installed")
PAIRS, LENGTH = 12, 20


@pytest.fixture(scope="module", autouse=True)
def _trl() -> None:
    pytest.importorskip("trl", reason="compares with TRL, which is not installed")


class Answers:
    """Masks of answers, and the log probabilities of their tokens under two models, 0 elsewhere; [P, S]."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        prompts, lengths = rng.integers(1, 6, PAIRS), rng.integers(1, 14, PAIRS)
        columns = np.arange(LENGTH)[None]
        self.mask = (columns >= prompts[:, None]) & (columns < (prompts + lengths)[:, None])
        targets = self.mask[:, 1:]
        self.policy, self.reference = (
            np.where(targets, -rng.gamma(2.0, 0.7, targets.shape), 0).astype(np.float32) for _ in range(2)
        )

    @property
    def tokens(self) -> np.ndarray:
        return self.mask.sum(1)


def sums_of(chosen: Answers, rejected: Answers, drift: float | None = None) -> PairSums:
    """The sums that the losses of this project are functions of."""
    parts = [chosen.policy.sum(1), rejected.policy.sum(1), chosen.tokens, rejected.tokens]
    parts += [chosen.reference.sum(1), rejected.reference.sum(1)]
    arrays = (jnp.asarray(x, jnp.float32) for x in parts)
    return PairSums(*arrays, drift=None if drift is None else jnp.float32(drift))


def model_of(log_probs: np.ndarray) -> Any:
    """A model as TRL calls it, which answers with these log probabilities."""
    x = torch.from_numpy(log_probs)
    outputs = SimpleNamespace(log_probs=x, entropy=x, mean_logits=x, is_top1=x > -1)
    return lambda **_: outputs


def trainer_of(**settings: Any) -> Any:
    """The attributes of a trainer that the computation of a loss reads."""
    same = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    defaults = {
        "accelerator": same,
        "model": torch.nn.Identity().eval(),
        "args": SimpleNamespace(gradient_checkpointing_kwargs=None),
        "aux_loss_enabled": False,
        "precompute_ref_logps": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
    }
    return SimpleNamespace(**{**defaults, **settings})


def dpo_of_trl(chosen: Answers, rejected: Answers, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> float:
    module = import_module("trl.trainer.dpo_trainer")
    monkeypatch.setattr(module, "disable_gradient_checkpointing", lambda *_: nullcontext())
    mask = torch.from_numpy(np.concatenate([chosen.mask, rejected.mask])).long()
    trainer = trainer_of(
        ref_model=model_of(np.concatenate([chosen.reference, rejected.reference])),
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        loss_weights=[1.0],
        **settings,
    )
    policy = model_of(np.concatenate([chosen.policy, rejected.policy]))
    inputs = {"input_ids": torch.zeros_like(mask), "attention_mask": mask, "completion_mask": mask}
    return float(module.DPOTrainer._compute_loss(trainer, policy, inputs, False))


@pytest.mark.parametrize(
    ("loss", "kind"), [(DpoConfig(beta=0.3), "sigmoid"), (IpoConfig(beta=0.3), "ipo")], ids=["dpo", "ipo"]
)
def test_losses_with_a_reference(loss: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, rejected = Answers(0), Answers(1)
    expected = dpo_of_trl(chosen, rejected, monkeypatch, loss_types=[kind], beta=0.3)
    assert np.mean(loss.losses(sums_of(chosen, rejected))) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_simpo(smoothing: float) -> None:
    module = import_module("trl.experimental.cpo.cpo_trainer")
    chosen, rejected = Answers(0), Answers(1)
    trainer = trainer_of(loss_type="simpo", alpha=0.0, beta=2.5, simpo_gamma=0.4, label_smoothing=smoothing)
    means = (torch.from_numpy((x.policy.sum(1) / x.tokens).astype(np.float32)) for x in (chosen, rejected))
    expected = module.CPOTrainer.cpo_loss(trainer, *means)[0].numpy()
    actual = SimpoConfig(beta=2.5, gamma=0.4, label_smoothing=smoothing).losses(sums_of(chosen, rejected))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_the_odds_ratio_of_orpo() -> None:
    module = import_module("trl.experimental.orpo.orpo_trainer")
    chosen, rejected = Answers(0), Answers(1)
    means = [torch.from_numpy((x.policy.sum(1) / x.tokens).astype(np.float32)) for x in (chosen, rejected)]
    ratios = module.ORPOTrainer.odds_ratio_loss(trainer_of(beta=0.7), *means)[0].numpy()
    actual = OrpoConfig(beta=0.7).losses(sums_of(chosen, rejected))
    # The likelihood is a mean over answers here, and over all tokens of the batch there.
    np.testing.assert_allclose(actual, -means[0].numpy() - ratios, rtol=1e-5, atol=1e-6)


def test_kto(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("trl.trainer.kto_trainer")
    monkeypatch.setattr(module, "disable_gradient_checkpointing", lambda *_: nullcontext())
    answers, drift, label = Answers(2), 0.4, np.arange(PAIRS) % 3 == 0
    mask = torch.from_numpy(answers.mask).long()
    policy, reference = model_of(answers.policy), model_of(answers.reference)
    trainer = trainer_of(
        ref_model=reference,
        loss_type="kto",
        calculate_KL=True,
        beta=0.3,
        desirable_weight=0.8,
        undesirable_weight=1.3,
        _compute_kl_logps=lambda model, _: torch.full((PAIRS,), drift if model is policy else 0.0),
    )
    inputs = {"input_ids": torch.zeros_like(mask), "attention_mask": mask, "completion_mask": mask}
    labels = torch.from_numpy(label)
    expected = float(module.KTOTrainer._compute_loss(trainer, policy, {**inputs, "label": labels}, False))
    sides = [
        np.where(label == side, x.sum(1), 0) for x in (answers.policy, answers.reference) for side in (True, False)
    ]
    tokens = [np.where(label == side, answers.tokens, 0) for side in (True, False)]
    arrays = (jnp.asarray(x, jnp.float32) for x in (*sides[:2], *tokens, *sides[2:]))
    loss = KtoConfig(beta=0.3, desirable_weight=0.8, undesirable_weight=1.3)
    assert np.mean(loss.losses(PairSums(*arrays, drift=jnp.float32(drift)))) == pytest.approx(expected, rel=1e-6)
