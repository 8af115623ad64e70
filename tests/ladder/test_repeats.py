"""The law for text that is read more than once, against planted constants, brute force and finite differences."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from cli import main
from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.diagnostics import backtest, collect_caveats
from lm_trainer.ladder.fit.fitting import fit, from_dict
from lm_trainer.ladder.fit.points import Points, points_from_rows
from lm_trainer.ladder.fit.predict import find_optimum, predict
from lm_trainer.ladder.fit.repeats import RepeatLaw, effective_tokens, make_design
from lm_trainer.ladder.fit.settings import FitSettings
from tests.ladder.test_fit import HOFFMANN, planted

REPEATED = RepeatLaw(**vars(HOFFMANN), repeats=15.0)
UNIQUE = 4e9
"""The points of `planted` have 0.5 to 1024e9 tokens, 0.125 to 256 passes over this text."""


def repeated(noise: float = 0.0, *, seed: int = 0, sizes: int = 6) -> Points:
    points = planted(sizes=sizes)
    unique = np.full(len(points), UNIQUE)
    errors = noise * np.random.default_rng(seed).standard_normal(len(points))
    return replace(
        points, loss=REPEATED.loss(points.num_params, points.tokens, unique) * np.exp(errors), unique_tokens=unique
    )


def test_the_worth_of_repeated_text() -> None:
    """Values from the sum: pass number r + 1 is worth exp(-r / R*) of new text, in the limit of small parts."""
    assert effective_tokens(3e9, UNIQUE, 15.0) == 3e9  # less than one pass
    assert effective_tokens(UNIQUE, UNIQUE, 15.0) == UNIQUE
    parts = np.arange(0, 3, 1e-4) + 5e-5
    worth = UNIQUE * (1 + np.exp(-parts / 15.0).sum() * 1e-4)
    assert effective_tokens(4 * UNIQUE, UNIQUE, 15.0) == pytest.approx(worth, rel=1e-8)
    # Text read without end is worth 1 + R* passes.
    assert effective_tokens(1e6 * UNIQUE, UNIQUE, 15.0) == pytest.approx(16 * UNIQUE)
    assert effective_tokens(4 * UNIQUE, UNIQUE, 1e9) == pytest.approx(4 * UNIQUE)


@pytest.mark.parametrize("method", ["vp", "huber"])
def test_planted_constants_are_recovered(method: str) -> None:
    fitted = fit(repeated(sizes=4), FitSettings(method=method, draws=50))
    for name in REPEATED.names:
        assert getattr(fitted.law, name) == pytest.approx(getattr(REPEATED, name), rel=1e-5)


def test_slopes_are_those_of_finite_differences() -> None:
    design = make_design(repeated())
    constants_K = design.to_constants(REPEATED)
    assert vars(design.to_law(constants_K)) == pytest.approx(vars(REPEATED))
    _, slopes_PK = design.predict(constants_K)
    for k in range(len(constants_K)):
        step_K = np.zeros(len(constants_K))
        step_K[k] = 1e-6 * constants_K[k]
        higher, lower = (design.predict(constants_K + sign * step_K)[0] for sign in (1, -1))
        assert slopes_PK[:, k] == pytest.approx((higher - lower) / (2 * step_K[k]), rel=1e-5, abs=1e-8)


def test_the_best_use_of_compute_with_limited_text_is_that_of_brute_force() -> None:
    fitted = fit(repeated(), FitSettings(draws=50))
    flops = 1e22
    best = find_optimum(fitted, flops, unique_tokens=UNIQUE, extrapolate=True)
    sizes = np.geomspace(1e8, 1e13, 200001)
    losses = REPEATED.loss(sizes, flops / 6 / sizes, UNIQUE)
    assert best.num_params.value == pytest.approx(sizes[np.argmin(losses)], rel=1e-3)
    assert best.loss.value == pytest.approx(losses.min(), rel=1e-6)
    fresh = find_optimum(fitted, flops, extrapolate=True)
    assert fresh.num_params.value == pytest.approx(HOFFMANN.optimum(flops)[0], rel=1e-4)
    assert fresh.num_params.value < best.num_params.value


def test_predictions_with_repeated_text() -> None:
    fitted = fit(repeated(0.002, seed=1), FitSettings(draws=200))
    assert fitted.interval("repeats")[0] < 15 < fitted.interval("repeats")[1]
    n, d = 6.4e9, 6.4e10
    prediction = predict(fitted, n, d, unique_tokens=UNIQUE)
    assert prediction.law.contains(float(REPEATED.loss(n, d, UNIQUE)))
    assert prediction.law.low > predict(fitted, n, d).law.high
    assert prediction.warnings == ()
    assert "600 passes over the text, the points have at most 256" in predict(
        fitted, 1e8, 600 * UNIQUE, unique_tokens=UNIQUE
    ).warnings[-1]  # fmt: skip
    assert all(held.predicted.contains(held.measured) for held in backtest(fitted))
    assert from_dict(json.loads(json.dumps(fitted.as_dict())), "x").digest() == fitted.digest()


def test_text_that_is_hardly_repeated_says_nothing_about_repeats() -> None:
    points = planted(0.002)
    with pytest.raises(UserError, match=r"at most 0.1 passes over their text.*train 2 points past one pass"):
        fit(replace(points, unique_tokens=10 * points.tokens))
    # With 1 to 1.05 passes, R* may have any value.
    once = replace(points, unique_tokens=points.tokens / np.linspace(1, 1.05, len(points)))
    notes = collect_caveats(fit(once, FitSettings(draws=50)))
    assert any("repeats" in note and ("not identified" in note or "at its bound" in note) for note in notes)
    with pytest.raises(UserError, match="has no term for repeated text"):
        predict(fit(points, FitSettings(draws=50)), 1e9, 1e10, unique_tokens=UNIQUE)


@pytest.mark.slow
def test_intervals_of_repeats_cover_the_truth_at_their_nominal_rate() -> None:
    """90 % intervals over 120 draws of noise: the binomial standard deviation of a rate is 2.7 points."""
    hits, trials = np.zeros(2), 120
    for seed in range(trials):
        fitted = fit(repeated(0.003, seed=seed), FitSettings(draws=150, seed=seed))
        low, high = fitted.interval("repeats")
        prediction = predict(fitted, 1e10, 1e11, unique_tokens=UNIQUE)
        hits += low <= 15 <= high, prediction.law.contains(float(REPEATED.loss(1e10, 1e11, UNIQUE)))
    assert ((hits / trials > 0.82) & (hits / trials < 0.98)).all(), hits / trials


def lmt(*arguments: object) -> Result:
    return CliRunner().invoke(main.app, ["ladder", *map(str, arguments)], env={"COLUMNS": "200"})


def test_repeated_text_by_command(tmp_path: Path) -> None:
    points = repeated(0.001)
    rows = [
        {"N": n, "D": d, "loss": loss, "U": UNIQUE}
        for n, d, loss in zip(points.num_params, points.tokens, points.loss, strict=True)
    ]
    table, out = tmp_path / "points.json", tmp_path / "fit.json"
    table.write_text(json.dumps(rows))
    assert points_from_rows(rows, source="x").unique_tokens == pytest.approx(points.unique_tokens)
    shown = lmt("fit", table, "--draws", 50, "--out", out)
    assert shown.exit_code == 0, shown.output
    assert "D' = U (1 + R* (1 - exp(-(D / U - 1) / R*)))" in shown.output
    assert "\nrepeats " in shown.output
    plain = json.loads(
        lmt("predict", out, "--params", 1e9, "--tokens", 8e10, "--unique-tokens", UNIQUE, "--json").output
    )
    assert plain["law"]["value"] == pytest.approx(float(REPEATED.loss(1e9, 8e10, UNIQUE)), rel=3e-3)
    table.write_text(json.dumps([{key: value for key, value in row.items() if key != "U"} for row in rows]))
    assert "\nrepeats " in lmt("fit", table, "--draws", 50, "--unique-tokens", UNIQUE).output
    assert "--unique-tokens 0: it has to be finite" in lmt("fit", table, "--unique-tokens", 0).output
