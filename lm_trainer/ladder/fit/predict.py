"""Predictions of runs, with intervals and with their distance from the measured runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.bootstrap import central_interval, student_t_factor
from lm_trainer.ladder.fit.fitting import Fit
from lm_trainer.ladder.fit.law import training_flops
from lm_trainer.ladder.fit.repeats import RepeatLaw
from lm_trainer.ladder.fit.task import TWO_STEP

MAX_EXTRAPOLATION = 100.0
"""Multiple of the largest rung's compute beyond which predictions must be requested explicitly."""


@dataclass(frozen=True)
class Range:
    """A number with its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"

    def contains(self, value: float) -> bool:
        """Returns True if a measurement is within the interval."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class PredictedAccuracy:
    """The accuracy of a task by one form."""

    form: str
    law: Range
    """Accuracy by the law, with the uncertainty of the law."""
    run: Range
    """Accuracy that a run would measure, with an interval that includes the noise of a single run."""


@dataclass(frozen=True)
class Prediction:
    """The prediction of one run."""

    num_params: float
    tokens: float
    flops: float
    ratio: float
    """Ratio of the run's compute to the compute of the largest rung."""
    metric: str
    level: float
    law: Range
    """Loss that the law gives, with the uncertainty of the law."""
    run: Range
    """Loss that a run would measure, with an interval that includes the noise of a single run."""
    accuracy: Range | None = None
    """Accuracy of a task by the chosen form. Its interval spans the intervals of the laws of all forms that the
    held-out rungs do not exclude."""
    accuracies: tuple[PredictedAccuracy, ...] = ()
    """Accuracy of the task by each form, beginning with the chosen one."""
    task_metric: str | None = None
    warnings: tuple[str, ...] = ()
    """Sentences about quantities, other than compute, that are outside the range of the points."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the values as plain data at full precision."""
        return asdict(self)


@dataclass(frozen=True)
class Optimum:
    """Optimal allocation of a compute budget."""

    flops: float
    ratio: float
    level: float
    metric: str
    num_params: Range
    tokens: Range
    tokens_per_param: Range
    loss: Range

    def as_dict(self) -> dict[str, Any]:
        """Returns the values as plain data at full precision."""
        return asdict(self)


def predict(
    fit: Fit,
    num_params: float,
    tokens: float,
    *,
    unique_tokens: float | None = None,
    max_extrapolation: float = MAX_EXTRAPOLATION,
    extrapolate: bool = False,
) -> Prediction:
    """Predicts the loss of a run, and its accuracy if the fit has a sigmoid.

    Args:
        fit: the fit.
        num_params: N of the run.
        tokens: D of the run.
        unique_tokens: number of distinct tokens in its text; None if no token is seen twice.
        max_extrapolation: maximum ratio of the run's compute to the compute of the largest rung.
        extrapolate: ignores `max_extrapolation`.

    Raises:
        UserError: if the ratio is above `max_extrapolation` and `extrapolate` is not set, or the law is not for
            repeated text.
    """
    _check_unique_tokens(fit, unique_tokens)
    for name, value in (("--params", num_params), ("--tokens", tokens)):
        if not (np.isfinite(value) and value > 0):
            raise UserError(f"{name} {value:g}: it has to be finite and above 0")
    flops = training_flops(num_params, tokens)
    ratio = check_range(fit, flops, max_extrapolation=max_extrapolation, extrapolate=extrapolate)
    level, value = fit.settings.level, float(fit.law.loss(num_params, tokens, unique_tokens))
    drawn = fit.draws.loss(num_params, tokens, unique_tokens)
    # A measurement is the loss of a drawn law times independent noise. The estimate of the noise from few residuals is
    # itself uncertain, so the noise is widened by Student's factor, as for the draws.
    noise = fit.noise * student_t_factor(len(fit.points), level, len(fit.law.names))
    single = drawn * np.exp(noise * np.random.default_rng([fit.settings.seed, 3]).standard_normal(drawn.shape))
    accuracies = predict_accuracies(fit, num_params, tokens, (value, drawn, single))
    return Prediction(
        num_params,
        tokens,
        flops,
        ratio,
        fit.points.metric,
        level,
        Range(value, *central_interval(drawn, level)),
        Range(value, *central_interval(single, level)),
        combine_accuracies(fit, accuracies),
        accuracies,
        fit.points.task_metric,
        (*_ratio_warnings(fit, tokens / num_params), *_repeat_warnings(fit, tokens, unique_tokens)),
    )


def predict_accuracies(
    fit: Fit, num_params: float, tokens: float, losses: tuple[float, np.ndarray, np.ndarray]
) -> tuple[PredictedAccuracy, ...]:
    """Predicts the accuracy of a task by each form of the fit, beginning with the chosen one.

    Args:
        fit: the fit.
        num_params: N of the run.
        tokens: D of the run.
        losses: the predicted loss, its draws by the law, and its draws for a single run.
    """
    task, level = fit.task, fit.settings.level
    if task is None:
        return ()
    value, drawn, single = losses
    # Each drawn law is combined with one drawn sigmoid, so that the interval contains both uncertainties.
    count = min(len(drawn), len(task.chain_draws.a))
    sigmoids = type(task.chain)(*(column[:count] for column in vars(task.chain_draws).values()))
    rng = np.random.default_rng([fit.settings.seed, 5])

    def measure(accuracy_R: np.ndarray, noise: float, constants: int) -> Range:
        widened = noise * student_t_factor(len(fit.points), level, constants)
        measured_R = accuracy_R + widened * rng.standard_normal(accuracy_R.shape)
        return Range(best, *central_interval(np.clip(measured_R, 0, 1), level))

    best = float(task.chain.accuracy(value))
    accuracies = [
        PredictedAccuracy(
            TWO_STEP,
            Range(best, *central_interval(sigmoids.accuracy(drawn[:count]), level)),
            measure(sigmoids.accuracy(single[:count]), task.chain_noise, 4),
        )
    ]
    for direct in task.direct:
        best, drawn_R = direct.accuracy(num_params, tokens), direct.drawn_accuracy(num_params, tokens)
        run = measure(drawn_R, direct.noise, 2 * len(direct.factors))
        accuracies.append(PredictedAccuracy(direct.form, Range(best, *central_interval(drawn_R, level)), run))
    return tuple(sorted(accuracies, key=lambda accuracy: accuracy.form != task.form))


def combine_accuracies(fit: Fit, accuracies: tuple[PredictedAccuracy, ...]) -> Range | None:
    """Returns the accuracy by the chosen form, with an interval that spans the intervals of all plausible forms."""
    if fit.task is None:
        return None
    laws = [accuracy.law for accuracy in accuracies if accuracy.form in fit.task.plausible]
    return Range(laws[0].value, min(law.low for law in laws), max(law.high for law in laws))


def find_optimum(
    fit: Fit,
    flops: float,
    *,
    unique_tokens: float | None = None,
    max_extrapolation: float = MAX_EXTRAPOLATION,
    extrapolate: bool = False,
) -> Optimum:
    """Finds the numbers of parameters and tokens with the lowest loss for a compute budget of 6 N D.

    With `unique_tokens`, all tokens are from a text with so many distinct ones.

    Raises:
        UserError: for the same reasons as in `predict`, or if the law has no optimum because it does not depend on size
            or on length.
    """
    _check_unique_tokens(fit, unique_tokens)
    if not (np.isfinite(flops) and flops > 0):
        raise UserError(f"--flops {flops:g}: it has to be finite and above 0")
    ratio = check_range(fit, flops, max_extrapolation=max_extrapolation, extrapolate=extrapolate)
    if fit.law.A == 0 or fit.law.B == 0:
        factor = "parameters" if fit.law.A == 0 else "tokens"
        raise UserError(
            f"the fitted law does not depend on {factor}, so that no allocation is best; add rungs and fit again"
        )
    num_params, tokens = fit.law.optimum(flops, unique_tokens)
    drawn_params, drawn_tokens = fit.draws.optimum(flops, unique_tokens)
    level = fit.settings.level
    # Draws in which A or B is 0 have no optimum and become NaN.
    with np.errstate(invalid="ignore"):
        drawn_loss = fit.draws.loss(drawn_params, drawn_tokens, unique_tokens)
    return Optimum(
        flops,
        ratio,
        level,
        fit.points.metric,
        Range(float(num_params), *central_interval(drawn_params, level)),
        Range(float(tokens), *central_interval(drawn_tokens, level)),
        Range(float(tokens / num_params), *central_interval(drawn_tokens / drawn_params, level)),
        Range(float(fit.law.loss(num_params, tokens, unique_tokens)), *central_interval(drawn_loss, level)),
    )


def _ratio_warnings(fit: Fit, tokens_per_param: float) -> tuple[str, ...]:
    ratios = fit.points.tokens / fit.points.num_params
    # Rounding to whole steps changes the ratio of a rung slightly.
    if 0.99 * ratios.min() <= tokens_per_param <= 1.01 * ratios.max():
        return ()
    range_ = f"{ratios.min():.3g} to {ratios.max():.3g}"
    return (
        f"D / N is {tokens_per_param:.3g}, outside that of the points ({range_}), where the law was not seen to hold",
    )


def _check_unique_tokens(fit: Fit, unique_tokens: float | None) -> None:
    if unique_tokens is None:
        return
    if not (np.isfinite(unique_tokens) and unique_tokens > 0):
        raise UserError(f"--unique-tokens {unique_tokens:g}: it has to be finite and above 0")
    if not isinstance(fit.law, RepeatLaw):
        raise UserError(
            "--unique-tokens: the law of this fit has no term for repeated text; fit points with more than one pass "
            "over their text with: lmt ladder fit --unique-tokens U"
        )


def _repeat_warnings(fit: Fit, tokens: float, unique_tokens: float | None) -> tuple[str, ...]:
    if unique_tokens is None or fit.points.unique_tokens is None:
        return ()
    passes, seen = tokens / unique_tokens, float((fit.points.tokens / fit.points.unique_tokens).max())
    if passes <= 1.01 * max(seen, 1):
        return ()
    return (f"{passes:.3g} passes over the text, the points have at most {seen:.3g}",)


class HasLargestRung(Protocol):
    """A fit to rungs."""

    @property
    def max_flops(self) -> float:
        """Compute (6 N D) of the largest rung."""
        ...


def check_range(fit: HasLargestRung, flops: float, *, max_extrapolation: float, extrapolate: bool) -> float:
    """Returns the ratio of a compute budget to the largest rung's compute; raises `UserError` if it is too large."""
    ratio = flops / fit.max_flops
    if ratio > max_extrapolation and not extrapolate:
        raise UserError(
            f"{flops:.3g} FLOPs are {ratio:,.4g} times those of the largest rung ({fit.max_flops:.3g}), beyond "
            f"--max-extrapolation {max_extrapolation:g}; a rung of {flops / max_extrapolation:.3g} FLOPs would be near "
            "enough, or add --extrapolate to predict it all the same"
        )
    return float(ratio)


def prediction_lines(prediction: Prediction) -> list[str]:
    """Formats a prediction as lines for the terminal."""
    low, high = prediction.law.low, prediction.law.high
    percent = f"{prediction.level:.0%}"
    text_lines = [
        f"{prediction.metric} at N {prediction.num_params:.4g}, D {prediction.tokens:.4g}: {prediction.run.value:.4f}",
        f"  {percent} interval of the law {low:.4f} to {high:.4f}; of a single run {prediction.run.low:.4f} to "
        f"{prediction.run.high:.4f}",
    ]
    if prediction.accuracy is not None:
        value, low, high = prediction.accuracy.value, prediction.accuracy.low, prediction.accuracy.high
        text_lines.append(
            f"{prediction.task_metric}: {value:.4f}, {percent} {low:.4f} to {high:.4f} over the forms not excluded"
        )
    for accuracy in prediction.accuracies:
        by_law, by_run = accuracy.law, accuracy.run
        text_lines.append(
            f"  by {accuracy.form}: {by_law.value:.4f}, {percent} {by_law.low:.4f} to {by_law.high:.4f}; of a single "
            f"run {by_run.low:.4f} to {by_run.high:.4f}"
        )
    return [*text_lines, *prediction.warnings, describe_extrapolation(prediction.flops, prediction.ratio)]


def optimum_lines(fit: Fit, best: Optimum) -> list[str]:
    """Formats an optimum as lines for the terminal."""
    return [
        f"best use of {best.flops:.4g} FLOPs (6 N D), {best.level:.0%} intervals:",
        f"  N {best.num_params}",
        f"  D {best.tokens}",
        f"  D / N {best.tokens_per_param}",
        f"  {best.metric} {best.loss.value:.4f} ({best.loss.low:.4f} to {best.loss.high:.4f})",
        *_ratio_warnings(fit, best.tokens_per_param.value),
        describe_extrapolation(best.flops, best.ratio),
    ]


def describe_extrapolation(flops: float, ratio: float) -> str:
    """Returns a sentence about the extrapolation distance, which is shown with every prediction."""
    if ratio <= 1:
        return f"{flops:.3g} FLOPs, within the compute of the rungs ({ratio:.2g} of the largest)"
    return (
        f"{flops:.3g} FLOPs, {ratio:,.4g} times the largest rung; the intervals hold the noise of the points, not the "
        "chance that the law itself does not go on"
    )
