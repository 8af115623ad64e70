"""Simulated loss curves of ladders, from a law that is known."""

from __future__ import annotations

import numpy as np

from lm_trainer.ladder.curve.areas import RatePlan, Windows
from lm_trainer.ladder.curve.law import CurveLaw
from lm_trainer.ladder.curve.rungs import RungCurve

TRUTH = CurveLaw(L0=1.5, A=60.0, B=80.0, C=0.075, alpha=0.35, beta=0.4, gamma=0.05, horizon=30.0)
SIZES = (26_000, 43_000, 80_000, 133_000)
TARGET = 273_000


def plan_of(num_params: int, *, multiple: float = 2.0, decays: bool = True) -> RatePlan:
    """A run of a nano ladder: warm-up, and decays that end at 0.5, 1, 2 ... times Chinchilla."""
    batch = round(2048 * 160 * (num_params / 108e6) ** (2 / 3) / 64) * 64
    steps, warmup = round(20 * num_params * multiple / batch), num_params // batch + 1
    rates_S = np.ones(steps)
    rates_S[:warmup] = np.arange(warmup) / warmup
    ends = [round(steps * end / multiple) for end in (0.5, 1.0, 2.0) if end <= multiple]
    for start, end in zip([0, *ends], ends, strict=False) if decays else ():
        decay = (end - start) // 10
        rates_S[end - decay : end] = 1 - np.arange(1, decay + 1) / decay
    return RatePlan(num_params, rates_S, batch, warmup)


def losses_of(plan: RatePlan, law: CurveLaw = TRUTH) -> np.ndarray:
    """The loss of every step after the warm-up; before it, the first of these."""
    later = Windows(1, np.arange(plan.warmup + 1, plan.steps + 1))
    loss_S = np.empty(plan.steps)
    loss_S[plan.warmup :] = law.loss(plan, later)
    loss_S[: plan.warmup] = loss_S[plan.warmup]
    return loss_S


def noisy_losses(plan: RatePlan, rng: np.random.Generator, offset: float = 0.005, noise: float = 0.03) -> np.ndarray:
    """Losses with an error of the complete run, slow errors along it, and the noise of batches."""
    slow_S = 0.002 * np.repeat(rng.standard_normal(plan.steps // 50 + 1), 50)[: plan.steps]
    noise_S = noise * np.sqrt(2000 / plan.batch_tokens) * rng.standard_normal(plan.steps)
    return losses_of(plan) * np.exp(offset * rng.standard_normal() + slow_S + noise_S)


def cut(plan: RatePlan, loss_S: np.ndarray, noise: float = 0.0) -> RungCurve:
    """The curve of a run with these losses."""
    windows = plan.windows()
    return RungCurve(str(plan.num_params), str(plan.num_params), plan, windows, windows.mean(loss_S), noise)
