"""Predicts the loss of a run by step, with a band.

Shape letters: W is the number of windows of the run, D the number of draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.health.alerts.predicted_curve import PredictedCurve
from lm_trainer.ladder.config import LadderConfig
from lm_trainer.ladder.curve.areas import RatePlan, plan_rates
from lm_trainer.ladder.curve.fitting import CurveFit
from lm_trainer.ladder.curve.law import EXPONENT_RANGES
from lm_trainer.ladder.curve.rungs import TRAIN_LOSS
from lm_trainer.ladder.fit.law import training_flops
from lm_trainer.ladder.fit.predict import MAX_EXTRAPOLATION, check_range, describe_extrapolation
from lm_trainer.ladder.rungs import count_model_params, run_config, vocab_size_of
from lm_trainer.ladder.tables import format_number, format_table
from lm_trainer.run.config.predicted_run import identify_curve
from lm_trainer.run.config.run_config import RunConfig, numeric_differences

_COPIES = 20
"""Number of runs that are drawn from each drawn law."""
_SHOWN_ROWS = 12
_FAR = 1.5
"""Ratio to the largest value of the rungs from which on a quantity of the run causes a warning."""
_TINY = 1e-6
"""Distance from the end of a range below which a constant is at this end."""
_NEAR_BATCH = 0.2
"""Maximum relative difference between the batch of a run and the batch of the recipe, without a warning."""


@dataclass(frozen=True)
class PredictedRun:
    """A run whose curve is predicted."""

    name: str
    plan: RatePlan
    identity: Mapping[str, Any]
    """Part of its configuration that determines its curve."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class CurvePrediction:
    """The predicted curve of a run."""

    run: PredictedRun
    curve: PredictedCurve
    flops: float
    ratio: float
    """Ratio of the run's compute to the compute of the largest rung."""
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as plain data at full precision."""
        plan = self.run.plan
        return {
            "name": self.run.name,
            "num_params": plan.num_params,
            "tokens": plan.tokens,
            "steps": plan.steps,
            "batch_tokens": plan.batch_tokens,
            "flops": self.flops,
            "ratio": self.ratio,
            "curve": self.curve.as_dict(),
            "warnings": list(self.warnings),
        }


def size_to_predict(ladder: LadderConfig, size: str) -> PredictedRun:
    """Returns the run of a size of the ladder."""
    config = run_config(ladder, size)
    num_params = count_model_params(config.model, vocab_size_of(ladder))
    return PredictedRun(size, plan_rates(config, num_params, size), identify_curve(config))


def run_to_predict(ladder: LadderConfig, config: RunConfig, name: str) -> PredictedRun:
    """Returns a run with a configuration of its own, of any size, length and schedule, but with the ladder's text and
    loss.

    Raises:
        UserError: if the run has other data than the ladder, or the form of the law cannot take its schedule.
    """
    identity, rung = identify_curve(config), run_config(ladder, ladder.sizes[0])
    expected = identify_curve(rung)
    shared = ("data", "loss")
    differences = numeric_differences(
        {key: expected[key] for key in shared}, {key: identity[key] for key in shared}, config
    )
    if config.model.seq_len != rung.model.seq_len:
        differences.append(f"model.seq_len: was {rung.model.seq_len}, now {config.model.seq_len}")
    if differences:
        raise UserError(
            f"{name} has other data than the rungs of {ladder.name} ({'; '.join(differences[:3])}), so that their "
            "curves do not predict its loss; train rungs on its data"
        )
    plan = plan_rates(config, count_model_params(config.model, vocab_size_of(ladder)), name)
    warnings = []
    target = ladder.run_configurator.configure_target_batch_size(plan.num_params)
    if abs(plan.batch_tokens - target) > _NEAR_BATCH * target:
        warnings.append(
            f"the batch has {plan.batch_tokens:,} tokens, and the recipe of the rungs {target:,} for this size, "
            "where the law was not seen to hold"
        )
    return PredictedRun(name, plan, identity, tuple(warnings))


def predict_curve(
    fit: CurveFit, run: PredictedRun, *, max_extrapolation: float = MAX_EXTRAPOLATION, extrapolate: bool = False
) -> CurvePrediction:
    """Predicts the training loss of a run over its windows of steps.

    The band of each window contains the uncertainty of the law, the error of a complete run and the noise of a window.

    Args:
        fit: the fitted law of curves.
        run: the run.
        max_extrapolation: maximum ratio of the run's compute to the compute of the largest rung.
        extrapolate: ignores `max_extrapolation`.

    Raises:
        UserError: if the ratio is above `max_extrapolation` and `extrapolate` is not set, or the schedule of the run
            anneals and none of the rungs does.
    """
    plan = run.plan
    windows, flops = plan.windows(), float(training_flops(plan.num_params, plan.tokens))
    ratio = check_range(fit, flops, max_extrapolation=max_extrapolation, extrapolate=extrapolate)
    _check_annealing(fit, run)
    value_W = fit.law.loss(plan, windows)
    if value_W.min() <= 0:
        raise UserError(
            f"{run.name}: the law predicts losses below 0, so far is the run from the rungs; add larger rungs"
        )
    rng = np.random.default_rng([fit.seed, 6])
    laws_DW = np.repeat(np.stack([law.loss(plan, windows) for law in fit.draws]), _COPIES, axis=0)
    errors_DW = fit.noise(plan, windows) * rng.standard_normal(laws_DW.shape)
    errors_DW += fit.offset * fit.widening * rng.standard_normal((len(laws_DW), 1))
    tails = [(1 - fit.level) / 2, (1 + fit.level) / 2]
    low_W, high_W = np.quantile(laws_DW * np.exp(errors_DW), tails, axis=0)
    curve = PredictedCurve(
        TRAIN_LOSS,
        fit.level,
        windows.length,
        windows.last_W.tolist(),
        value_W.tolist(),
        np.maximum(low_W, 0.0).tolist(),
        high_W.tolist(),
    )
    return CurvePrediction(run, curve, flops, ratio, (*run.warnings, *_collect_warnings(fit, plan)))


def _check_annealing(fit: CurveFit, run: PredictedRun) -> None:
    if run.plan.annealed and not any(curve.plan.annealed for curve in fit.curves):
        raise UserError(
            f"{run.name}: its learning rate falls, and those of the rungs never do, so that nothing is known of what "
            "this gains; train rungs with a decay, such as those of wsds_chinchilla"
        )


def find_bounds(fit: CurveFit) -> list[str]:
    """Returns the exponents of the law that are at the ends of their ranges, and L0 if it is 0, with their values."""
    law = fit.law
    values = {"alpha": law.alpha, "beta": law.beta}
    at_end = [name for name, value in values.items() if not _is_inside(value, *EXPONENT_RANGES[name])]
    if law.L0 < _TINY:
        at_end.insert(0, "L0")
    return [f"{name} {getattr(law, name):.3g}" for name in at_end]


def _is_inside(value: float, low: float, high: float) -> bool:
    return low + _TINY < value < high - _TINY


def _collect_warnings(fit: CurveFit, plan: RatePlan) -> list[str]:
    """Returns sentences about what is outside the range of the rungs."""
    warnings, horizon = [], fit.law.horizon
    if bounds := find_bounds(fit):
        warnings.append(f"at the end of its range, and not determined by the rungs: {', '.join(bounds)}")
    reached = max(float(curve.plan.annealing_area(horizon).max()) for curve in fit.curves)
    area = float(plan.annealing_area(horizon).max())
    if area > _FAR * reached:
        warnings.append(f"the annealing area reaches {area:.3g}, in the rungs only {reached:.3g}")
    per_param = [curve.plan.tokens / curve.plan.num_params for curve in fit.curves]
    if plan.tokens / plan.num_params > _FAR * max(per_param):
        warnings.append(f"D / N reaches {plan.tokens / plan.num_params:.3g}, in the rungs only {max(per_param):.3g}")
    return warnings


def curve_lines(fit: CurveFit, prediction: CurvePrediction) -> list[str]:
    """Formats a prediction as lines for the terminal, with some of its windows."""
    curve, plan, law = prediction.curve, prediction.run.plan, fit.law
    count = len(curve.last_steps)
    shown = sorted({round(i * (count - 1) / (_SHOWN_ROWS - 1)) for i in range(_SHOWN_ROWS)})
    rows = [
        [
            f"{curve.last_steps[i]:,}",
            format_number(curve.last_steps[i] * plan.batch_tokens),
            f"{plan.rates_S[curve.last_steps[i] - 1]:.3f}",
            *(f"{column[i]:.4f}" for column in (curve.value, curve.low, curve.high)),
        ]
        for i in shown
    ]
    percent = f"{fit.level:.0%}"
    return [
        f"{curve.metric} of {prediction.run.name} (N {format_number(plan.num_params)}, {plan.steps:,} steps), mean of "
        f"{curve.window} steps, {len(shown)} of {count} windows:",
        format_table(["step", "tokens", "rate / peak", "predicted", f"{percent} low", "high"], rows),
        f"law of {len(fit.curves)} curves: L = {law.L0:.4g} + {law.A:.4g} / S1^{law.alpha:.3g} + {law.B:.4g} / "
        f"N^{law.beta:.3g} - {law.C:.4g} S2 / N^{law.gamma:.3g}, annealing forgotten in {law.horizon:.3g} steps",
        f"errors of rungs against the law: {fit.offset:.2%} of a run, {fit.wander:.2%} along a run",
        *prediction.warnings,
        describe_extrapolation(prediction.flops, prediction.ratio),
    ]
