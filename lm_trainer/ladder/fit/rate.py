"""Fits the best learning rate to the tokens of a run and of a batch.

Dimensions: G groups of runs with the same tokens and batch, K fitted constants: the log of the rate at the reference,
and the exponent of each quantity that varies.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.predict import Range
from lm_trainer.ladder.fit.run_values import RunValues, read_run_values
from lm_trainer.ladder.rate_law import RateLaw

_VARIED = (
    *("optimizer.learning_rate", "optimizer.warmup", "trainer.seed", "trainer.num_train_steps"),
    *("trainer.train_batch_size", "trainer.elastic_shards"),
)
QUANTITIES = ("tokens", "batch_size")


@dataclass(frozen=True)
class BestRate:
    """The best learning rate of the runs with the same numbers of tokens."""

    tokens: int
    """Number of tokens of a run."""
    batch_size: int
    """Number of tokens of a batch."""
    rate: float
    """Minimum of a parabola in log rate through the lowest loss and its neighbours."""
    loss: float
    """The lowest loss, a mean over seeds."""
    num_runs: int


@dataclass(frozen=True)
class RateFit:
    """A law, and the uncertainty of its constants."""

    best: tuple[BestRate, ...]
    law: RateLaw
    fitted: tuple[str, ...]
    """Quantities whose exponents were fitted."""
    covariance_KK: np.ndarray | None
    """Covariance of the constants; None if there are no more groups than constants."""
    level: float

    def exponent(self, quantity: str) -> Range | None:
        """Returns the fitted exponent of a quantity with its interval; None if there is none."""
        if self.covariance_KK is None or quantity not in self.fitted:
            return None
        index = 1 + self.fitted.index(quantity)
        value = self.law.exponents[quantity]
        half = self._quantile * math.sqrt(self.covariance_KK[index, index])
        return Range(value, value - half, value + half)

    def predict(self, tokens: float, batch_size: float) -> Range | None:
        """Returns the best rate of a run with the uncertainty of the law; None if there is no interval."""
        if self.covariance_KK is None:
            return None
        point = {"tokens": tokens, "batch_size": batch_size}
        features_K = np.array([1.0, *(math.log(point[name] / self.law.reference[name]) for name in self.fitted)])
        half = self._quantile * math.sqrt(features_K @ self.covariance_KK @ features_K)
        rate = self.law.rate(tokens, batch_size)
        return Range(rate, rate * math.exp(-half), rate * math.exp(half))

    @property
    def _quantile(self) -> float:
        return float(stats.t.ppf((1 + self.level) / 2, len(self.best) - 1 - len(self.fitted)))


def read_best_rates(names: Sequence[str], metric: str) -> tuple[BestRate, ...]:
    """Reads runs of several learning rates, and finds the best rate for each number of tokens and batch size.

    Args:
        names: run IDs or run directories.
        metric: the loss.

    Raises:
        UserError: if a run does not exist, is not finished, lacks the metric, or differs from the first one in more
            than its rate, warm-up, length, batch and seed; or if the best rate of a group is the lowest or highest one.
    """
    losses: dict[tuple[int, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in read_run_values(names, "a law of learning rates", _VARIED):
        tokens, batch_size = _count_tokens(run)
        losses[tokens, batch_size][float(run.settings["optimizer"]["learning_rate"])].append(run.positive(metric))
    return tuple(_find_best(*numbers, by_rate) for numbers, by_rate in sorted(losses.items()))


def _count_tokens(run: RunValues) -> tuple[int, int]:
    """Returns the tokens of a run and of a batch."""
    trainer = run.settings["trainer"]
    rows, steps = trainer["train_batch_size"], trainer["num_train_steps"]
    if not isinstance(rows, int):
        raise UserError(f"{run.name} changes its batch during the run; a law of learning rates is of constant batches")
    if run.step < steps:
        raise UserError(f"{run.name} ends at step {run.step:,} of {steps:,}; finish it, or leave it out")
    batch_size = rows * run.settings["model"]["seq_len"]
    return steps * batch_size, batch_size


def _find_best(tokens: int, batch_size: int, by_rate: Mapping[float, Sequence[float]]) -> BestRate:
    rates = sorted(by_rate)
    losses = [float(np.mean(by_rate[rate])) for rate in rates]
    lowest = int(np.argmin(losses))
    group = f"the runs of {tokens:,} tokens with a batch of {batch_size:,}"
    if lowest in (0, len(rates) - 1):
        tried = ", ".join(f"{rate:g}" for rate in rates)
        side = "lower" if lowest == 0 else "higher"
        raise UserError(f"{group} have their lowest loss at an end of the rates {tried}; add runs with a {side} rate")
    around = slice(lowest - 1, lowest + 2)
    best = parabola_minimum(rates[around], losses[around])
    return BestRate(tokens, batch_size, best, losses[lowest], sum(len(values) for values in by_rate.values()))


def parabola_minimum(rates: Sequence[float], losses: Sequence[float]) -> float:
    """Returns the rate at the minimum of the parabola through losses, as a function of the log of the rate."""
    square, linear, _ = np.polyfit(np.log(rates), losses, 2)
    return math.exp(-linear / (2 * square))


def fit_rate_law(best: Sequence[BestRate], *, fixed: Mapping[str, float] | None = None, level: float = 0.9) -> RateFit:
    """Fits log rate = c + a log(tokens) + b log(batch size) by least squares.

    Args:
        best: the best rate of each group.
        fixed: exponents that are not fitted, by quantity. A quantity that does not vary and is not fixed gets 0.
        level: confidence level of the intervals, by Student's t.

    Raises:
        UserError: if the exponents are not determined.
    """
    fixed = dict(fixed or {})
    values = {name: np.array([float(getattr(group, name)) for group in best]) for name in QUANTITIES}
    fitted = tuple(name for name in QUANTITIES if name not in fixed and len(set(values[name])) > 1)
    reference = {name: float(np.exp(np.log(x_G).mean())) for name, x_G in values.items()}
    logs = {name: np.log(x_G / reference[name]) for name, x_G in values.items()}
    design_GK = np.stack([np.ones(len(best)), *(logs[name] for name in fitted)], axis=1)
    if np.linalg.matrix_rank(design_GK, tol=1e-6) < design_GK.shape[1]:
        raise UserError(
            "tokens and batch size of the runs change together, so their exponents are not determined; add runs in "
            "which one changes alone, or fix an exponent with --tokens-exponent or --batch-exponent"
        )
    offset_G = sum((exponent * logs[name] for name, exponent in fixed.items()), np.zeros(len(best)))
    target_G = np.log([group.rate for group in best]) - offset_G
    constants_K = np.linalg.lstsq(design_GK, target_G, rcond=None)[0]
    freedom = len(best) - len(constants_K)
    covariance_KK = None
    if freedom > 0:
        errors_G = target_G - design_GK @ constants_K
        covariance_KK = np.linalg.inv(design_GK.T @ design_GK) * float(errors_G @ errors_G) / freedom
    exponents = {**dict.fromkeys(QUANTITIES, 0.0), **fixed, **dict(zip(fitted, constants_K[1:].tolist(), strict=True))}
    law = RateLaw(
        learning_rate=math.exp(constants_K[0]),
        **reference,
        tokens_exponent=exponents["tokens"],
        batch_exponent=exponents["batch_size"],
    )
    return RateFit(tuple(best), law, fitted, covariance_KK, level)
