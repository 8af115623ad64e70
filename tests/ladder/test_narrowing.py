"""Forecasts of narrower intervals, against closed forms and against fits to the measurements that were forecast."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from cli import main
from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.bootstrap import student_t_factor
from lm_trainer.ladder.fit.compare import compare
from lm_trainer.ladder.fit.comparison_plan import plan_comparison, present_width
from lm_trainer.ladder.fit.fitting import Fit, fit, save
from lm_trainer.ladder.fit.law import Law
from lm_trainer.ladder.fit.narrowing import (
    Rung,
    half_width,
    larger_rungs,
    possible_rungs,
    propose,
    remaining_variance,
    rungs_of_points,
    target_draws,
)
from lm_trainer.ladder.fit.points import Points
from lm_trainer.ladder.fit.settings import FitSettings
from lm_trainer.ladder.metrics import collect_rows
from tests.ladder.test_fit import HOFFMANN, planted
from tests.ladder.test_fit_commands import ladder_of, run_by_hand

NOISE, TARGET = 0.003, (1e10, 2e11)
BETTER = Law(1.69, 406.4 / 1.25**0.34, 410.7 / 1.25**0.28, 0.34, 0.28)
"""Every parameter and token is worth 1.25 of the other recipe's: a multiplier of 1.25^2."""


def with_runs(points: Points, rungs: list[Rung], *, seed: int, law: Law = HOFFMANN) -> Points:
    n, d = np.array([(rung.num_params, tokens) for rung in rungs for tokens in rung.tokens]).T
    loss = law.loss(n, d) * np.exp(NOISE * np.random.default_rng(seed).standard_normal(len(n)))
    labels = (*points.labels, *(f"new {i}" for i in range(len(n))))
    arrays = {"num_params": n, "tokens": d, "loss": loss}
    joined = {name: np.concatenate([getattr(points, name), values]) for name, values in arrays.items()}
    return replace(points, **joined, labels=labels, runs=(*points.runs, *(f"{seed}/{size}" for size in n)))


@pytest.mark.parametrize("seeds", [1, 3, 15])
def test_more_seeds_of_everything_narrow_as_the_mean_does(seeds: int) -> None:
    """With draws that are exactly normal, `seeds` more runs of every point leave 1 / (1 + seeds) of the variance."""
    fitted = fit(planted(NOISE, sizes=4), FitSettings(draws=50))
    points, t = fitted.points, student_t_factor(16, 0.9, 5)
    # The law linearised in its constants, with the covariance of least squares.
    columns_PK = np.stack([points.num_params**-0.34, points.tokens**-0.28], -1)
    columns_PK /= HOFFMANN.loss(points.num_params, points.tokens)[:, None]
    covariance = (t * fitted.noise) ** 2 * np.linalg.inv(columns_PK.T @ columns_PK)
    errors_RK = np.random.default_rng(0).standard_normal((4000, 2))
    # Exactly the covariance, without the noise of drawing.
    errors_RK -= errors_RK.mean(0)
    errors_RK = errors_RK @ np.linalg.inv(np.linalg.cholesky(np.cov(errors_RK.T))).T @ np.linalg.cholesky(covariance).T
    constant = np.ones(len(errors_RK))
    draws = Law(1.69 * constant, 406.4 + errors_RK[:, 0], 410.7 + errors_RK[:, 1], 0.34 * constant, 0.28 * constant)
    normal = replace(fitted, draws=draws)
    left = remaining_variance(normal, target_draws(normal, *TARGET), [(r, seeds) for r in rungs_of_points(points)])
    later = student_t_factor(16 * (1 + seeds), 0.9, 5)
    assert left == pytest.approx((later / t) ** 2 / (1 + seeds), rel=0.02)


def test_an_interval_narrows_as_forecast() -> None:
    """One and two steps beyond the largest size: forecast, and then fitted with losses of these sizes."""
    ratios = []
    for seed in range(4):
        fitted = fit(planted(NOISE, seed=seed, sizes=4), FitSettings(draws=100))
        before = target_draws(fitted, *TARGET)
        for rung in larger_rungs(rungs_of_points(fitted.points), 2):
            later = fit(with_runs(fitted.points, [rung], seed=100 + seed), FitSettings(draws=100))
            forecast = np.sqrt(remaining_variance(fitted, before, [(rung, 1)]))
            ratios.append(half_width(target_draws(later, *TARGET), 0.9) / half_width(before, 0.9) / forecast)
    assert np.exp(np.log(ratios).mean()) == pytest.approx(1, abs=0.2)


def test_proposals_are_ordered_by_gain_for_compute_or_within_a_budget() -> None:
    fitted = fit(planted(NOISE, seed=1, sizes=4), FitSettings(draws=100))
    target_R, rungs = target_draws(fitted, *TARGET), possible_rungs(fitted.points)
    assert len(rungs) == 2 * 4 + 2 + 3
    proposals = propose(fitted, target_R, rungs)
    within = half_width(target_R, 0.9)
    for proposal, following in pairwise(proposals):
        assert proposal.gain >= following.gain
        assert proposal.gain == pytest.approx(np.log(within / proposal.within) / proposal.flops)
    bounded = propose(fitted, target_R, rungs, budget=5e21)
    assert bounded[0].within == min(p.within for p in proposals if p.flops <= 5e21)
    assert bounded[0].name == "new size N 1.6B"
    with pytest.raises(UserError, match=r"--budget 1: the cheapest run takes 1.92e\+19 FLOPs"):
        propose(fitted, target_R, rungs, budget=1)


def pair_of_fits(seeds: int, *, seed: int) -> tuple[Fit, Fit]:
    fits = []
    for number, law in enumerate((HOFFMANN, BETTER)):
        points = planted(NOISE, seed=1000 * number + seed, law=law, sizes=4)
        rungs = rungs_of_points(points)
        for more in range(1, seeds):
            points = with_runs(points, rungs, seed=1000 * number + 10 * seed + more, law=law)
        fits.append(fit(points, FitSettings(draws=150)))
    return fits[0], fits[1]


def test_a_comparison_with_the_planned_seeds_has_the_wanted_width() -> None:
    widths, planned = [], []
    for seed in range(3):
        fits = pair_of_fits(1, seed=seed)
        target = compare(*fits, flops=[5e20], tokens_per_param=80)[0]
        rungs = rungs_of_points(fits[0].points), rungs_of_points(fits[1].points)
        wanted = present_width(target) / 2
        plans = plan_comparison(fits, target, wanted, rungs)
        assert [plan.added_sizes for plan in plans] == [0, 1, 2]
        assert all(plan.reached and plan.within <= wanted for plan in plans)
        # Three more seeds of all sizes of both ladders.
        more = plans[0].seeds - 1
        assert plans[0].flops == pytest.approx(more * 2 * sum(rung.flops for rung in rungs[0]))
        planned.append(more)
        again = compare(*pair_of_fits(plans[0].seeds, seed=seed), flops=[5e20], tokens_per_param=80)[0]
        widths.append(present_width(again) / wanted)
        assert again.multiplier.low < 1.25**2 < again.multiplier.high or seed > 0
    # A half of the width takes four times the runs, less what Student's factor gains.
    assert set(planned) <= {2, 3, 4}
    assert np.exp(np.log(widths).mean()) == pytest.approx(0.95, abs=0.25)


def test_a_width_that_cannot_be_reached_is_said() -> None:
    fits = pair_of_fits(1, seed=0)
    target = compare(*fits, flops=[5e20])[0]
    rungs = rungs_of_points(fits[0].points), rungs_of_points(fits[1].points)
    assert not plan_comparison(fits, target, 1e-4, rungs)[0].reached
    with pytest.raises(UserError, match="--within 0: it has to be above 0"):
        plan_comparison(fits, target, 0, rungs)
    never = replace(target, multiplier=replace(target.multiplier, low=0.0))
    with pytest.raises(UserError, match="may never reach the loss of A"):
        plan_comparison(fits, never, 0.1, rungs)


def lmt(*arguments: object) -> Result:
    return CliRunner().invoke(main.app, ["ladder", *map(str, arguments)], env={"COLUMNS": "200"})


H100 = ("--device", "NVIDIA H100 80GB HBM3", "--price", 2)


def test_needs_of_a_comparison_by_command(tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for fitted, file in zip(pair_of_fits(1, seed=0), files, strict=True):
        save(fitted, file)
    shown = lmt("compare", *files, "--within", 0.02, *H100)
    assert shown.exit_code == 0, shown.output
    assert "to within 2.0%, both ladders together need:" in shown.output
    assert "device hours" in shown.output
    plain = json.loads(lmt("compare", *files, "--within", 0.02, "--json", *H100).output)
    assert len(plain["comparisons"]) == 3
    for need in plain["needs"]:
        # 40 % of 989 TFLOP/s, the peak of the datasheet.
        assert need["device_hours"] == pytest.approx(need["flops"] / (0.4 * 989e12) / 3600, rel=1e-3)
        assert need["cost"] == pytest.approx(2 * need["device_hours"])
    at = ("--flops", 5e20, "--within", 0.5)
    assert "which is enough" in lmt("compare", *files, *at).output
    assert "name the device with --device" in lmt("compare", *files, *at, "--price", 2).output


def test_the_next_run_of_a_ladder_is_one_of_its_sizes(tmp_path: Path) -> None:
    ladder = ladder_of(tmp_path)
    for size in ladder.sizes:
        run_by_hand(ladder, size)
    n = ladder.get_num_params("target")
    command = ("next", tmp_path / "ladder.yaml", "--params", 4 * n, "--tokens", 160 * n)
    plain = json.loads(lmt(*command, "--json").output)
    names = [run["name"] for run in plain["runs"]]
    assert sorted(names) == sorted(
        ["new size target", *(f"another seed of {s}" for s in "abcd"), *(f"{s} to twice its length" for s in "abcd")]
    )
    new = plain["runs"][names.index("new size target")]
    shown = lmt(*command)
    assert f"first: {names[0]}, to +-" in shown.output
    assert "narrowest: " in shown.output
    assert "next needs the run to predict" in lmt("next", tmp_path / "ladder.yaml").output
    assert "--budget" in lmt(*command, "--budget", 1).output
    # The run that was proposed takes the compute that is measured of it.
    run_by_hand(ladder, "target")
    last = collect_rows(ladder, "target")[-1]
    assert (new["num_params"], new["tokens"], new["flops"]) == (n, last["tokens"], last["flops"])


def test_a_target_far_away_is_refused_with_the_rung_that_would_be_enough(tmp_path: Path) -> None:
    fitted, file = fit(planted(NOISE), FitSettings(draws=50)), tmp_path / "fit.json"
    save(fitted, file)
    far = 1000 * fitted.max_flops
    enough = f"a rung of {far / 100:.3g} FLOPs would be near enough"
    for command in ("predict", "next"):
        shown = lmt(command, file, "--params", 1e11, "--tokens", far / 6e11)
        assert shown.exit_code == 2
        assert enough in " ".join(shown.output.split())
