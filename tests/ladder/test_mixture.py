"""The law of mixtures: known laws are recovered, intervals cover, and runs that determine no law are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.mixture import (
    MixtureLaw,
    MixtureRuns,
    find_best_mixture,
    fit_mixture,
    fit_mixture_law,
    left_out_errors,
    parse_weights,
)
from tests.conftest import Lmt

SETS, METRICS = ("code", "math", "web"), ("eval/code/loss", "eval/web/loss")
TRUTH = (MixtureLaw(1.1, np.array([-1.4, 0.2, 0.9])), MixtureLaw(2.0, np.array([0.8, 0.3, -0.9])))


def make_runs(count: int = 14, noise: float = 0.0, seed: int = 0) -> MixtureRuns:
    rng = np.random.default_rng(seed)
    weights_PM = rng.dirichlet(np.ones(3), count)
    loss_PV = np.stack([law.loss(weights_PM) for law in TRUTH], axis=1)
    return MixtureRuns(
        SETS,
        METRICS,
        weights_PM,
        loss_PV * np.exp(noise * rng.standard_normal(loss_PV.shape)),
        tuple(f"run-{n}" for n in range(count)),
    )


def test_a_law_without_noise_is_recovered() -> None:
    runs = make_runs()
    for law, loss_P in zip(TRUTH, runs.loss_PV.T, strict=True):
        found = fit_mixture_law(runs.weights_PM, loss_P)
        assert found.floor == pytest.approx(law.floor, rel=1e-4)
        np.testing.assert_allclose(found.slopes_M, law.slopes_M, rtol=1e-3, atol=1e-3)
    assert np.nanmax(np.abs(left_out_errors(runs))) < 1e-4


def mean_loss(weights_M: np.ndarray) -> Any:
    return np.mean([law.loss(weights_M) for law in TRUTH], axis=0)


def test_the_best_mixture_equals_that_of_a_grid() -> None:
    runs = make_runs(noise=1e-6)
    best = find_best_mixture(fit_mixture(runs, draws=50))
    steps = np.linspace(0, 1, 401)
    grid = np.array([(a, b, 1 - a - b) for a in steps for b in steps if a + b <= 1])
    low, high = runs.weights_PM.min(axis=0) - 1e-9, runs.weights_PM.max(axis=0) + 1e-9
    grid = grid[((grid >= low) & (grid <= high)).all(axis=1)]
    expected = grid[mean_loss(grid).argmin()]
    found = np.array([weight.value for weight in best.weights])
    np.testing.assert_allclose(found, expected, atol=5e-3)
    # Between two points of the grid.
    assert -1e-3 < mean_loss(found) - mean_loss(grid).min() < 1e-6
    assert best.loss.value == pytest.approx(mean_loss(found), rel=1e-5)
    assert best.gain.value == pytest.approx(mean_loss(runs.weights_PM).min() - mean_loss(found), rel=1e-3)


@pytest.mark.slow
def test_intervals_contain_a_new_run_at_their_rate() -> None:
    """90 % of 120 predictions, of which two standard deviations are 5.5 %."""
    noise, weights_M, inside = 0.004, np.array([0.25, 0.25, 0.5]), []
    for seed in range(60):
        fit = fit_mixture(make_runs(10, noise, seed), draws=100)
        rng = np.random.default_rng([seed, 7])
        for metric, law in enumerate(TRUTH):
            measured = float(law.loss(weights_M)) * np.exp(noise * rng.standard_normal())
            inside.append(fit.predict_run(metric, weights_M).contains(measured))
    assert 0.83 <= np.mean(inside) <= 0.98, np.mean(inside)


def test_too_few_or_too_equal_runs_are_refused() -> None:
    with pytest.raises(UserError, match=r"5 runs are too few .* it takes 6"):
        fit_mixture(make_runs(5))
    runs = make_runs(8)
    alike = np.where(np.arange(8)[:, None] % 2, runs.weights_PM[0], runs.weights_PM[1])
    with pytest.raises(UserError, match="too alike"):
        fit_mixture(MixtureRuns(SETS, METRICS, alike, runs.loss_PV, runs.labels))


def test_weights_outside_of_the_runs_are_refused() -> None:
    fit = fit_mixture(make_runs(8, 1e-3), draws=50)
    for given, message in (
        ({"code": 1.0, "web": 1.0}, "check math"),
        ({"code": 1.0, "math": 0.0, "web": 0.0}, "code has the proportion 1, and the runs have"),
        ({"code": -1.0, "math": 1.0, "web": 1.0}, "finite and at least 0"),
    ):
        with pytest.raises(UserError, match=message):
            parse_weights(fit, given)
    np.testing.assert_allclose(parse_weights(fit, {"code": 2, "math": 1, "web": 1}), [0.5, 0.25, 0.25])
    parse_weights(fit, {"code": 1.0, "math": 0.0, "web": 0.0}, extrapolate=True)


def write_run(directory: Path, weights: Any, losses: dict[str, float], **changes: Any) -> None:
    """Writes what the command reads of a run."""
    identity = {"data": {"train_weights": weights}, "trainer": {"seed": 0}, "model": {"hidden_dim": 8}, **changes}
    directory.mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps({"id": directory.name, "identity": identity}))
    lines = [{"step": 1, "train/loss": 9.0}, {"step": 5, **losses}]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_runs(path: Path) -> list[str]:
    runs = make_runs(9, 1e-3)
    for label, weights_M, loss_V in zip(runs.labels, runs.weights_PM, runs.loss_PV, strict=True):
        write_run(
            path / "logs" / label, dict(zip(SETS, weights_M, strict=True)), dict(zip(METRICS, loss_V, strict=True))
        )
    return list(runs.labels)


def test_the_command_reads_runs_and_prints_the_best_weights(in_tmp_path: Path, lmt: Lmt) -> None:
    names = write_runs(in_tmp_path)
    text = lmt("ladder", "mixture", *names, "--draws", "50", "--weights", "code=1,math=1,web=2").stdout
    assert "L(r) = E + exp(t . r), 9 runs" in text
    assert "eval/web/loss: 2.8" in text
    plain = json.loads(lmt("ladder", "mixture", *names, "--draws", "50", "--json").stdout)
    assert set(plain["best"]["weights"]) == set(SETS)
    assert [law["metric"] for law in plain["laws"]] == list(METRICS)


@pytest.mark.parametrize(
    ("weights", "changes", "message"),
    [
        ([[0, {"code": 1.0}]], {}, "weights that change during the run"),
        (None, {}, "no data.train_weights"),
        ({"code": 0.5, "web": 0.5}, {"model": {"hidden_dim": 16}}, "differ in model.hidden_dim"),
    ],
)
def test_other_runs_are_refused(in_tmp_path: Path, lmt: Lmt, weights: Any, changes: Any, message: str) -> None:
    names = write_runs(in_tmp_path)
    write_run(in_tmp_path / "logs" / "other", weights, dict.fromkeys(METRICS, 2.0), **changes)
    result = lmt("ladder", "mixture", *names, "other")
    assert result.returncode == 2
    assert message in result.stderr
