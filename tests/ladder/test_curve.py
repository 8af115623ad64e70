"""The law of loss curves against simulated ladders whose truth is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.health.alerts.predicted_curve import score_curve
from lm_trainer.ladder import ModelLadder
from lm_trainer.ladder.curve.areas import RatePlan, plan_rates
from lm_trainer.ladder.curve.fitting import CurveFit, fit_curves
from lm_trainer.ladder.curve.predict import PredictedRun, find_bounds, predict_curve
from lm_trainer.run.config.run_config import RunConfig
from tests.ladder.curves import SIZES, TARGET, TRUTH, cut, losses_of, noisy_losses, plan_of
from tests.ladder.test_fit_commands import ladder_of


def target(**options: bool) -> PredictedRun:
    return PredictedRun("target", plan_of(TARGET, **options), {})


@pytest.fixture(scope="module")
def exact() -> CurveFit:
    """A fit to curves without noise."""
    return fit_curves([cut(plan, losses_of(plan)) for plan in map(plan_of, SIZES)], draws=20)


def test_the_areas_are_the_sums_of_the_paper() -> None:
    """Tissue et al. 2024, equation 1, written as loops."""
    plan, horizon = plan_of(26_000), 25.0
    peak = [1.0] * plan.warmup + list(plan.rates_S[plan.warmup :])
    forward, annealing, total, area = [], [], 0.0, 0.0
    for step in range(plan.steps):
        total += plan.rates_S[step] * plan.batch_tokens
        area += sum((peak[k - 1] - peak[k]) * (1 - 1 / horizon) ** (step - k) for k in range(1, step + 1))
        forward.append(total)
        annealing.append(area)
        if step == 250:
            break
    assert plan.forward_area()[:251] == pytest.approx(forward)
    assert plan.annealing_area(horizon)[:251] == pytest.approx(annealing, abs=1e-9)
    assert max(annealing) > 5


def test_windows_end_with_the_run_and_leave_out_the_warmup() -> None:
    plan = plan_of(133_000)
    windows = plan.windows()
    assert windows.last_W[-1] == plan.steps
    assert windows.last_W[0] - windows.length >= 2 * plan.warmup
    assert set(np.diff(windows.last_W)) == {windows.length}
    steps_S = np.arange(1, plan.steps + 1)
    assert windows.mean(steps_S) == pytest.approx(windows.last_W - (windows.length - 1) / 2)


def test_the_constants_of_curves_without_noise_are_found(exact: CurveFit) -> None:
    law = exact.law
    assert law.alpha == pytest.approx(TRUTH.alpha, rel=0.02)
    assert abs(law.L0 - TRUTH.L0) < 0.05 * TRUTH.L0
    assert law.beta == pytest.approx(TRUTH.beta, rel=0.2)
    assert law.horizon == pytest.approx(TRUTH.horizon, rel=0.03)
    assert exact.offset < 1e-3


def test_the_curve_of_a_larger_run_is_predicted_step_by_step(exact: CurveFit) -> None:
    run = target()
    curve = predict_curve(exact, run).curve
    truth_W = cut(run.plan, losses_of(run.plan)).loss_W
    assert np.array(curve.value) == pytest.approx(truth_W, rel=0.004)
    # The decays are seen: the loss falls in a decay and rises after it.
    decay_end = curve.window_of(round(run.plan.steps / 2))
    assert decay_end is not None
    assert curve.value[decay_end] < curve.value[decay_end - 8] - 0.02
    assert curve.value[decay_end + 4] > curve.value[decay_end] + 0.01


def test_another_schedule_than_that_of_the_rungs_is_predicted(exact: CurveFit) -> None:
    plan = plan_of(TARGET, decays=False)
    rates_S = plan.rates_S * (0.55 + 0.45 * np.cos(np.pi * np.arange(plan.steps) / plan.steps))
    cosine = RatePlan(TARGET, rates_S, plan.batch_tokens, plan.warmup)
    curve = predict_curve(exact, PredictedRun("cosine", cosine, {})).curve
    assert np.array(curve.value) == pytest.approx(cut(cosine, losses_of(cosine)).loss_W, rel=0.01)


def test_the_band_holds_the_noise_of_a_run() -> None:
    rng = np.random.default_rng(3)
    fit = fit_curves([cut(plan, noisy_losses(plan, rng), 0.03) for plan in map(plan_of, SIZES)], draws=20)
    wide, run = predict_curve(fit, target()).curve, target()
    inner = predict_curve(replace(fit, level=0.5), run).curve
    loss_S = noisy_losses(run.plan, rng)
    score = score_curve(wide, np.arange(1, run.plan.steps + 1), loss_S)
    assert score.windows == len(wide.last_steps)
    assert score.inside > 0.7 * score.windows
    assert np.mean(np.array(wide.high) - wide.low) > 1.5 * np.mean(np.array(inner.high) - inner.low)


def test_constants_at_the_end_of_their_range_are_named(exact: CurveFit) -> None:
    assert find_bounds(exact) == []
    assert predict_curve(exact, target()).warnings == ()
    # Losses that fall with the size faster than any exponent of the range.
    steep = [cut(plan, losses_of(plan, replace(TRUTH, B=1e12, beta=2.6))) for plan in map(plan_of, SIZES)]
    fit = fit_curves(steep, draws=20)
    assert find_bounds(fit) == ["beta 2"]
    assert "not determined by the rungs: beta 2" in predict_curve(fit, target()).warnings[0]


@pytest.mark.slow
def test_the_band_covers_at_its_rate() -> None:
    """The fraction of windows inside the 90 % band, over ladders of four sizes with noise of their own."""
    covered = []
    for seed in range(24):
        rng = np.random.default_rng([seed, 9])
        curves = []
        for plan in map(plan_of, SIZES):
            loss_S = noisy_losses(plan, rng)
            curves.append(cut(plan, loss_S, float(np.std(np.diff(np.log(loss_S[plan.warmup :])))) / np.sqrt(2)))
        run = target()
        curve = predict_curve(fit_curves(curves, draws=30, seed=seed), run).curve
        score = score_curve(curve, np.arange(1, run.plan.steps + 1), noisy_losses(run.plan, rng))
        covered.append(score.inside / score.windows)
    assert 0.8 <= np.mean(covered) <= 0.99


def test_a_fit_is_reproducible(exact: CurveFit) -> None:
    again = fit_curves(exact.curves, draws=20)
    assert again.digest() == exact.digest()
    assert predict_curve(again, target()).curve == predict_curve(exact, target()).curve


def test_what_the_curves_do_not_determine_is_refused(exact: CurveFit) -> None:
    two = [curve for curve in exact.curves if curve.size in ("26000", "43000")]
    with pytest.raises(UserError, match=r"2 curves of 2 sizes .* it takes 3 sizes\n  x has no curve"):
        fit_curves(two, ["x has no curve"])
    with pytest.raises(UserError, match="train a fourth size, or set num_seeds to 2"):
        fit_curves(exact.curves[:3])
    with pytest.raises(UserError, match="--level 1: "):
        fit_curves(exact.curves, level=1.0)
    flat = [plan_of(size, decays=False) for size in SIZES]
    constant = fit_curves([cut(plan, losses_of(plan)) for plan in flat], draws=20)
    with pytest.raises(UserError, match="its learning rate falls, and those of the rungs never do"):
        predict_curve(constant, target())
    predicted = predict_curve(constant, target(decays=False)).curve
    assert np.array(predicted.value) == pytest.approx(
        cut(target(decays=False).plan, losses_of(target(decays=False).plan)).loss_W, rel=0.004
    )
    with pytest.raises(UserError, match="--extrapolate"):
        predict_curve(exact, target(), max_extrapolation=2)


def config_of(ladder: ModelLadder, **changes: object) -> RunConfig:
    config = ladder.run_config("a").model_dump(mode="json")
    for key, value in changes.items():
        section, name = key.split("__")
        config[section][name] = value
    return RunConfig.model_validate(config)


def test_schedules_that_the_form_cannot_take(tmp_path: Path) -> None:
    ladder = ladder_of(tmp_path)
    plan = plan_rates(config_of(ladder), 1000, "a")
    assert plan.batch_tokens == ladder.get_batch_size("a")
    assert plan.rates_S.max() == 1
    growing = config_of(ladder, trainer__train_batch_size=[{"start": 0, "value": 8}, {"start": 50, "value": 16}])
    with pytest.raises(UserError, match=r"train_batch_size changes from 8 to 16 rows .*; give one number"):
        plan_rates(growing, 1000, "a")
    with pytest.raises(UserError, match="starts from other weights"):
        plan_rates(config_of(ladder, trainer__initialize_from="other"), 1000, "a")
    short = RatePlan(1000, np.ones(30), 64, 10)
    with pytest.raises(UserError, match="30 steps with 10 of warm-up leave 10 windows of 1 steps"):
        short.windows()
