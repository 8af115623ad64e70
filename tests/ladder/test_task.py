"""The accuracy of a task by two steps and directly, against planted laws and simulated ladders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from benchmarks.ladder_coverage import CHANCE, FORMS, LAW, Tally, make_points, simulate_task
from cli import main
from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.accuracy import DirectCurve, fit_direct
from lm_trainer.ladder.fit.chain import SigmoidCurve
from lm_trainer.ladder.fit.chance import chance_of
from lm_trainer.ladder.fit.figures import draw_plots
from lm_trainer.ladder.fit.fitting import fit, from_dict
from lm_trainer.ladder.fit.points import Points
from lm_trainer.ladder.fit.predict import predict
from lm_trainer.ladder.fit.settings import FitSettings
from lm_trainer.ladder.fit.solver import Predictor
from lm_trainer.ladder.fit.sources import table_points
from lm_trainer.ladder.fit.task import fit_task
from tests.ladder.test_fit import RUNGS, THIRTEEN_B

SMALL, LARGE = "12 points of 4 sizes", "24 points of 6 sizes"


def exact_points(form: str) -> Points:
    points = make_points(LARGE, 0)
    task = FORMS[form](points.num_params, points.tokens, points.loss)
    return replace(points, task=task, task_metric="accuracy", chance=CHANCE)


@pytest.mark.parametrize(
    ("form", "factors", "exponents"),
    [
        ("compute", (2e20**0.2,), (0.2,)),
        ("size and tokens", (0.6 * 3e8**0.35, 0.6 * 2e10**0.3), (0.35, 0.3)),
    ],
)
def test_planted_constants_are_recovered(form: str, factors: tuple[float, ...], exponents: tuple[float, ...]) -> None:
    direct = fit_direct(exact_points(form), form, FitSettings(draws=50), draws=50)
    assert direct.factors == pytest.approx(factors, rel=1e-4)
    assert direct.exponents == pytest.approx(exponents, rel=1e-5)
    n, d = 1e10, 3e12
    truth = float(FORMS[form](np.asarray(n), np.asarray(d), np.asarray(0.0)))
    assert direct.accuracy(n, d) == pytest.approx(truth, abs=1e-8)
    assert direct.drawn_accuracy(n, d) == pytest.approx([truth] * 50, abs=1e-5)
    assert direct.noise < 1e-6


@pytest.mark.parametrize(
    ("curve", "constants"),
    [
        (DirectCurve(np.random.default_rng(0).standard_normal((9, 2)), 0.25), (0.8, 0.3, 0.4, 0.2)),
        (SigmoidCurve(np.linspace(2, 4, 9)), (0.7, 3.0, 2.9, 0.27)),
    ],
)
def test_slopes_are_those_of_finite_differences(curve: Predictor, constants: tuple[float, ...]) -> None:
    _, slopes_PK = curve.predict(np.array(constants))
    for k, value in enumerate(constants):
        step_K = np.eye(len(constants))[k] * 1e-6 * value
        higher, lower = (curve.predict(np.array(constants) + sign * step_K)[0] for sign in (1, -1))
        assert slopes_PK[:, k] == pytest.approx((higher - lower) / (2e-6 * value), rel=1e-6, abs=1e-9)


def test_intervals_of_a_direct_law_cover_the_truth() -> None:
    """90 % intervals over 40 draws of noise: the binomial standard deviation of a rate is 4.7 points."""
    hits, (n, d) = [], (3e9, 6e11)
    truth = float(FORMS["compute"](np.asarray(n), np.asarray(d), np.asarray(0.0)))
    for seed in range(40):
        points = make_points(SMALL, seed, form="compute")
        drawn = fit_direct(points, "compute", FitSettings(seed=seed), draws=60).drawn_accuracy(n, d)
        low, high = np.quantile(drawn, [0.05, 0.95])
        hits.append(low <= truth <= high)
    assert 0.76 < np.mean(hits) < 1


@pytest.mark.slow
def test_intervals_of_accuracies_cover_the_truth_at_their_nominal_rate() -> None:
    """The standard deviation of a rate of 90 % over 60 ladders is 3.9 points."""
    tally = Tally()
    for form in FORMS:
        for seed in range(60):
            simulate_task(tally, form, SMALL, 1000 + seed)
    for key, hits in tally.hits.items():
        truth, _, quantity = key
        # A chosen form alone does not cover the truth at its rate, nor do four constants with 12 points.
        if "all forms left" in quantity or ("chosen" not in quantity and "size and tokens" not in truth):
            assert np.mean(hits) > 0.78, (key, np.mean(hits))


def test_the_form_is_chosen_by_held_out_rungs() -> None:
    for form in ("two steps", "compute"):
        task = fit_task(make_points(LARGE, 3, form=form), FitSettings(draws=50))
        assert task.form == task.plausible[0] == form
        # The largest size has 4 lengths, the two largest have 8.
        assert task.held_out == 12
        assert task.reason().startswith(f"form: {form}, by the errors at 12 accuracies of held-out rungs ({form} 0.0")
    # Three accuracies do not exclude a form, and the interval says so.
    fitted = fit(make_points(SMALL, 0, form="two steps"), FitSettings(draws=100))
    assert fitted.task is not None
    assert fitted.task.held_out == 3
    assert len(fitted.task.plausible) > 1
    prediction = predict(fitted, 3e9, 6e11, extrapolate=True)
    assert prediction.accuracy is not None
    laws = [accuracy.law for accuracy in prediction.accuracies if accuracy.form in fitted.task.plausible]
    assert prediction.accuracy.low == min(law.low for law in laws)
    assert prediction.accuracy.high == max(law.high for law in laws)
    truth = float(FORMS["two steps"](np.asarray(0), np.asarray(0), np.asarray(LAW.loss(3e9, 6e11))))
    assert prediction.accuracy.contains(truth)


def test_without_a_rung_to_hold_out_no_form_is_excluded() -> None:
    points = make_points(SMALL, 0, form="compute")
    task = fit_task(points.select(points.num_params < points.sizes[-1]), FitSettings(draws=50))
    assert (task.form, task.held_out) == ("two steps", 0)
    assert set(task.plausible) == set(FORMS)
    assert "no rung could be held out; it takes another size" in task.reason()


def test_the_accuracy_of_a_published_model_is_in_the_interval_of_the_chosen_form() -> None:
    points = table_points(RUNGS, metric="hellaswag_bpb", task="hellaswag_accuracy").with_chance(0.25)
    fitted = fit(points)
    assert fitted.task is not None
    assert fitted.task.form == "two steps"
    prediction = predict(fitted, *THIRTEEN_B, extrapolate=True)
    assert prediction.accuracy is not None
    assert prediction.accuracy.contains(0.8319)
    # Both direct forms are too high for this model, at 202 times the compute of the largest rung.
    assert all(accuracy.law.low > 0.8319 for accuracy in prediction.accuracies[1:])
    assert from_dict(json.loads(json.dumps(fitted.as_dict())), "x").digest() == fitted.digest()


def test_a_task_at_chance_is_refused() -> None:
    points = make_points(SMALL, 0, form="compute")
    rng = np.random.default_rng(1)
    guessed = replace(points, task=rng.binomial(2000, 0.25, len(points)) / 2000, task_metric="lm_eval/arc_easy/acc")
    message = (
        r"--task lm_eval/arc_easy/acc: the accuracies \(0.2\d+ to 0.2\d+\) of a task with chance 0.25 do not rise with "
        r"compute, .* it takes rungs that reach about 0.2\d+, more examples, or the task's loss as --metric"
    )
    with pytest.raises(UserError, match=message):
        fit(guessed, FitSettings(draws=50))


def test_the_chance_of_well_known_tasks() -> None:
    assert chance_of("lm_eval/arc_easy/acc_norm") == 0.25
    assert chance_of("lm_eval/piqa/acc") == 0.5
    assert chance_of("eval/loss") == chance_of(None) == 0
    assert table_points(RUNGS, metric="hellaswag_bpb", task="hellaswag_accuracy").chance == 0


@pytest.mark.slow
def test_the_picture_shows_every_form_and_the_reason() -> None:
    fitted = fit(make_points(SMALL, 0, form="compute"), FitSettings(draws=50))
    assert fitted.task is not None
    plots = {title: (svg, caption) for title, svg, caption in draw_plots(fitted, [], None)}
    svg, caption = plots["Accuracy against compute"]
    assert fitted.task.reason() in caption
    assert svg.count("chosen") == 1


def lmt(*arguments: object) -> Result:
    return CliRunner().invoke(main.app, ["ladder", *map(str, arguments)], env={"COLUMNS": "200"})


def test_a_task_by_command(tmp_path: Path) -> None:
    out = tmp_path / "fit.json"
    options = ("--metric", "hellaswag_bpb", "--task", "hellaswag_accuracy", "--draws", 50)
    shown = lmt("fit", RUNGS, *options, "--chance", 0.25, "--out", out)
    assert shown.exit_code == 0, shown.output
    assert "-log((accuracy - 0.25) / 0.75) = " in shown.output
    assert "hellaswag_accuracy, form: two steps, by the errors at 4 accuracies of held-out rungs" in shown.output
    target = ("predict", out, "--params", 1e9, "--tokens", 1e11)
    assert "over the forms not excluded" in lmt(*target).output
    plain = json.loads(lmt(*target, "--json").output)
    assert [accuracy["form"] for accuracy in plain["accuracies"]] == ["two steps", "compute", "size and tokens"]
    assert "--chance 1: it has to be at least 0 and below 1" in lmt("fit", RUNGS, *options, "--chance", 1).output
    assert "name the task with --task" in lmt("fit", RUNGS, "--metric", "c4_loss", "--chance", 0.25).output
