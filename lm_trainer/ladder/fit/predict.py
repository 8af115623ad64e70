"""Predictions of runs that were not made, with intervals, and their distance from the runs that were."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.bootstrap import interval, student_factor
from lm_trainer.ladder.fit.fitting import Fit
from lm_trainer.ladder.fit.law import compute

MAX_EXTRAPOLATION = 100.0
"""Compute over that of the largest rung, up to which a prediction is made without being asked for expressly."""


@dataclass(frozen=True)
class Range:
    """A number with its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"

    def holds(self, value: float) -> bool:
        """True for a measurement within the interval."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Prediction:
    """The prediction of one run."""

    num_params: float
    tokens: float
    flops: float
    ratio: float
    """Ratio of its compute to that of the largest rung."""
    metric: str
    level: float
    law: Range
    """Loss by the law; the interval is that of the law."""
    run: Range
    """Loss that a run will measure: the interval holds the noise of a single run as well."""
    accuracy: Range | None = None
    task_metric: str | None = None
    warnings: tuple[str, ...] = ()
    """Sentences on ways other than compute in which it lies outside the points."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data with all digits."""
        return asdict(self)


@dataclass(frozen=True)
class Optimum:
    """The best use of a compute."""

    flops: float
    ratio: float
    level: float
    metric: str
    num_params: Range
    tokens: Range
    tokens_per_param: Range
    loss: Range

    def as_dict(self) -> dict[str, Any]:
        """Plain data with all digits."""
        return asdict(self)


def predict(
    found: Fit,
    num_params: float,
    tokens: float,
    *,
    max_extrapolation: float = MAX_EXTRAPOLATION,
    extrapolate: bool = False,
) -> Prediction:
    """The loss of a run, and its accuracy if the fit has one.

    Raises:
        UserError: beyond `max_extrapolation` times the compute of the largest rung, without `extrapolate`.
    """
    for name, value in (("--params", num_params), ("--tokens", tokens)):
        if not (np.isfinite(value) and value > 0):
            raise UserError(f"{name} {value:g}: it has to be finite and above 0")
    flops = compute(num_params, tokens)
    ratio = check_range(found, flops, max_extrapolation=max_extrapolation, extrapolate=extrapolate)
    level, value = found.settings.level, float(found.law.loss(num_params, tokens))
    drawn = found.draws.loss(num_params, tokens)
    # A measurement is the law of a draw times a noise of its own. The spread of so few residuals is itself uncertain,
    # which Student's factor covers, as it does for the draws.
    noise = found.noise * student_factor(len(found.points), level)
    single = drawn * np.exp(noise * np.random.default_rng([found.settings.seed, 3]).standard_normal(drawn.shape))
    accuracy = None
    if found.chain is not None and found.chain_draws is not None:
        # Each draw of the law is the input of one draw of the sigmoid, so that both uncertainties are in the interval.
        count = min(len(drawn), len(found.chain_draws.a))
        chained = type(found.chain)(*(column[:count] for column in vars(found.chain_draws).values()))
        likely = chained.accuracy(drawn[:count])
        accuracy = Range(float(found.chain.accuracy(value)), *interval(likely, level))
    return Prediction(
        num_params,
        tokens,
        flops,
        ratio,
        found.points.metric,
        level,
        Range(value, *interval(drawn, level)),
        Range(value, *interval(single, level)),
        accuracy,
        found.points.task_metric,
        _unseen(found, tokens / num_params),
    )


def optimum(
    found: Fit, flops: float, *, max_extrapolation: float = MAX_EXTRAPOLATION, extrapolate: bool = False
) -> Optimum:
    """Parameters and tokens of the least loss at a compute of 6 N D.

    Raises:
        UserError: as `predict`; and where the law has no optimum, since size or length do not matter in it.
    """
    if not (np.isfinite(flops) and flops > 0):
        raise UserError(f"--flops {flops:g}: it has to be finite and above 0")
    ratio = check_range(found, flops, max_extrapolation=max_extrapolation, extrapolate=extrapolate)
    if found.law.A == 0 or found.law.B == 0:
        what = "parameters" if found.law.A == 0 else "tokens"
        raise UserError(
            f"the fitted law does not depend on {what}, so that no allocation is best; add rungs and fit again"
        )
    num_params, tokens = found.law.optimum(flops)
    drawn_params, drawn_tokens = found.draws.optimum(flops)
    level = found.settings.level
    # Draws whose A or B is 0 have no optimum, and are NaN in the interval.
    with np.errstate(invalid="ignore"):
        drawn_loss = found.draws.loss(drawn_params, drawn_tokens)
    return Optimum(
        flops,
        ratio,
        level,
        found.points.metric,
        Range(float(num_params), *interval(drawn_params, level)),
        Range(float(tokens), *interval(drawn_tokens, level)),
        Range(float(tokens / num_params), *interval(drawn_tokens / drawn_params, level)),
        Range(float(found.law.loss(num_params, tokens)), *interval(drawn_loss, level)),
    )


def _unseen(found: Fit, tokens_per_param: float) -> tuple[str, ...]:
    seen = found.points.tokens / found.points.num_params
    # Whole steps move a rung a little.
    if 0.99 * seen.min() <= tokens_per_param <= 1.01 * seen.max():
        return ()
    range_ = f"{seen.min():.3g} to {seen.max():.3g}"
    return (
        f"D / N is {tokens_per_param:.3g}, outside that of the points ({range_}), where the law was not seen to hold",
    )


def check_range(found: Fit, flops: float, *, max_extrapolation: float, extrapolate: bool) -> float:
    """The ratio of a compute to that of the largest rung; raises `UserError` where that is too far to predict."""
    ratio = flops / found.max_flops
    if ratio > max_extrapolation and not extrapolate:
        raise UserError(
            f"{flops:.3g} FLOPs are {ratio:,.4g} times those of the largest rung ({found.max_flops:.3g}), beyond "
            f"--max-extrapolation {max_extrapolation:g}; add --extrapolate to predict it all the same, or "
            "train larger rungs"
        )
    return float(ratio)


def lines(prediction: Prediction) -> list[str]:
    """A prediction for the terminal."""
    low, high = prediction.law.low, prediction.law.high
    percent = f"{prediction.level:.0%}"
    found = [
        f"{prediction.metric} at N {prediction.num_params:.4g}, D {prediction.tokens:.4g}: {prediction.run.value:.4f}",
        f"  {percent} interval of the law {low:.4f} to {high:.4f}; of a single run {prediction.run.low:.4f} to "
        f"{prediction.run.high:.4f}",
    ]
    if prediction.accuracy is not None:
        accuracy = prediction.accuracy
        found.append(
            f"{prediction.task_metric}: {accuracy.value:.4f}, {percent} {accuracy.low:.4f} to {accuracy.high:.4f}"
        )
    return [*found, *prediction.warnings, distance(prediction.flops, prediction.ratio)]


def optimum_lines(found: Fit, best: Optimum) -> list[str]:
    """An optimum for the terminal."""
    return [
        f"best use of {best.flops:.4g} FLOPs (6 N D), {best.level:.0%} intervals:",
        f"  N {best.num_params}",
        f"  D {best.tokens}",
        f"  D / N {best.tokens_per_param}",
        f"  {best.metric} {best.loss.value:.4f} ({best.loss.low:.4f} to {best.loss.high:.4f})",
        *_unseen(found, best.tokens_per_param.value),
        distance(best.flops, best.ratio),
    ]


def distance(flops: float, ratio: float) -> str:
    """A sentence on how far a prediction reaches, for every prediction."""
    if ratio <= 1:
        return f"{flops:.3g} FLOPs, within the compute of the rungs ({ratio:.2g} of the largest)"
    return (
        f"{flops:.3g} FLOPs, {ratio:,.4g} times the largest rung; the intervals hold the noise of the points, not the "
        "chance that the law itself does not go on"
    )
