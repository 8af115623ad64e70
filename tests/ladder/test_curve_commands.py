"""`lmt ladder predict --curve | register --curve`, from the curves of runs to the report of the predicted run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lm_trainer.core.errors import UserError
from lm_trainer.health.alerts.predicted_curve import read_curve
from lm_trainer.ladder import ModelLadder
from lm_trainer.ladder.curve.areas import plan_rates
from lm_trainer.ladder.curve.law import CurveLaw
from lm_trainer.ladder.curve.register import score_curves
from lm_trainer.report.page import build_report_page
from lm_trainer.report.run import read_run
from lm_trainer.run.config.predicted_run import check_prediction
from lm_trainer.run.config.run_config import numeric_identity
from tests.conftest import run_here
from tests.ladder.curves import losses_of
from tests.ladder.test_fit_commands import SIZES, ladder_of, lmt
from tests.ladder.test_running import small
from tests.run.test_token_probabilities import page_data

LAW = CurveLaw(L0=1.5, A=40.0, B=30.0, C=0.02, alpha=0.35, beta=0.4, gamma=0.0, horizon=12.0)


def train_by_hand(ladder: ModelLadder, size: str, *, factor: float = 1.0, steps: int | None = None) -> None:
    """The directory that the run of a size leaves, with losses of `LAW`."""
    folder, config = Path(ladder.get_save_folder(size)), ladder.run_config(size)
    folder.mkdir(parents=True)
    record = {"identity": numeric_identity(config), "checkpoints": str(folder / "checkpoints")}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    plan = plan_rates(config, ladder.get_num_params(size), size)
    loss_S = factor * losses_of(plan, LAW)
    # The noise of batches falls with their size.
    loss_S *= np.exp(0.2 / np.sqrt(plan.batch_tokens) * np.random.default_rng(SIZES[size]).standard_normal(len(loss_S)))
    lines = [{"step": step, "train/loss": float(loss)} for step, loss in enumerate(loss_S[:steps], 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def ladder(tmp_path: Path) -> ModelLadder:
    trained = ladder_of(tmp_path)
    for size in trained.sizes:
        train_by_hand(trained, size)
    return trained


def watched(root: Path, prediction: Path) -> ModelLadder:
    """The ladder in a directory, with an alert outside a predicted band."""
    plain = yaml.safe_load((root / "ladder.yaml").read_text())
    return ModelLadder.model_validate({**plain, "trainer": {"alerts": {"off_prediction": {"file": str(prediction)}}}})


def test_predict_register_run_score(ladder: ModelLadder, tmp_path: Path) -> None:
    """As a user goes: a size is predicted by step before it is run, and compared afterwards."""
    config = tmp_path / "ladder.yaml"
    shown = lmt("predict", config, "--curve", "--size", "target")
    assert shown.exit_code == 0, shown.output
    assert "law of 4 curves: L = " in shown.output
    plain = json.loads(lmt("predict", config, "--curve", "--size", "target", "--json").output)
    plan = plan_rates(ladder.run_config("target"), ladder.get_num_params("target"), "target")
    truth = plan.windows().mean(losses_of(plan, LAW))
    assert plain["curve"]["value"] == pytest.approx(truth.tolist(), rel=0.02)
    assert plain["steps"] == plan.steps

    registered = lmt("register", config, "--curve", "--size", "target")
    assert registered.exit_code == 0, registered.output
    file = Path(ladder.dir) / "predictions" / "curves" / "target.json"
    assert re.search(r"registered, sha256 [0-9a-f]{64}", registered.output)
    assert f"trainer.alerts.off_prediction.file={file}" in registered.output
    assert read_curve(file).curve.value == plain["curve"]["value"]
    assert "choose another --out" in lmt("register", config, "--curve", "--size", "target").output
    assert "target: train/loss by step, predicted on" in (status := lmt("status", config).output)
    assert "not measured yet" in status

    # The run of the ladder is the run of the prediction.
    alerted = watched(tmp_path, file)
    check_prediction(alerted.run_config("target"))
    with pytest.raises(UserError, match="predicts another run"):
        check_prediction(alerted.run_config("d"))

    train_by_hand(alerted, "target")
    ((_, score),) = score_curves(ladder)
    assert score.windows == len(plain["curve"]["value"])
    assert score.inside >= 0.8 * score.windows
    assert json.loads(lmt("status", config, "--json").output)["curves"][0]["inside"] == score.inside
    assert "has been started" in lmt("register", config, "--curve", "--size", "target", "--out", "late.json").output


def test_the_report_draws_the_run_in_its_band(ladder: ModelLadder, tmp_path: Path) -> None:
    lmt("register", tmp_path / "ladder.yaml", "--curve", "--size", "target")
    file = Path(ladder.dir) / "predictions" / "curves" / "target.json"
    curve = read_curve(file).curve
    train_by_hand(watched(tmp_path, file), "target")
    folder = ladder.get_save_folder("target")
    data = page_data(build_report_page([read_run(folder)]))
    (chart,) = [chart for group in data["groups"] for chart in group["charts"] if chart["name"] == "train/loss"]
    assert chart["bands"] == [
        {"run": 0, "x": curve.last_steps, "y": curve.value, "low": curve.low, "high": curve.high},
    ]
    assert data["runs"][0]["prediction"]["windows"] == len(curve.value)
    assert data["runs"][0]["prediction"]["sha256"] == read_curve(file).sha256
    with pytest.raises(UserError, match=r"--prediction: .*predicts another run"):
        read_run(ladder.get_save_folder("d"), file)
    moved = file.rename(tmp_path / "moved.json")
    gone = read_run(folder)
    assert gone.prediction is None
    assert "name the file with --prediction" in gone.gaps[0]
    assert read_run(folder, moved).prediction == read_curve(moved)


def test_a_run_that_leaves_its_band_is_scored(ladder: ModelLadder, tmp_path: Path) -> None:
    lmt("register", tmp_path / "ladder.yaml", "--curve", "--size", "target")
    train_by_hand(ladder, "target", factor=1.5, steps=200)
    ((registered, score),) = score_curves(ladder)
    assert score.inside == 0
    assert score.windows < len(registered.curve.value)
    assert score.first_outside == registered.curve.last_steps[0]
    assert score.error == pytest.approx(1 / 1.5 - 1, abs=0.03)
    assert f"outside first at step {score.first_outside}" in score.describe(registered)


def test_a_run_with_a_schedule_of_its_own(ladder: ModelLadder, tmp_path: Path) -> None:
    run: dict[str, Any] = ladder.run_config("target").model_dump(mode="json")
    run["optimizer"] |= {"cycles": None, "decay": None, "lr_schedule": "cosine", "min_lr_ratio": 0.1}
    run["trainer"] |= {"id": "mine", "log_dir": str(tmp_path / "logs")}
    (file := tmp_path / "mine.yaml").write_text(yaml.safe_dump(run))
    out = tmp_path / "mine.json"
    done = lmt("register", tmp_path / "ladder.yaml", "--curve", "--run", file, "--out", out)
    assert done.exit_code == 0, done.output
    registered = read_curve(out)
    assert registered.name == "mine"
    config = ladder.run_config("target").model_validate(run)
    plan = plan_rates(config, ladder.get_num_params("target"), "mine")
    truth = plan.windows().mean(losses_of(plan, LAW))
    assert np.all((np.array(registered.curve.low) < truth) & (truth < registered.curve.high))
    assert registered.curve.value[-1] == pytest.approx(truth[-1], rel=0.05)

    run["data"]["train_urls"] = "other.txt"
    file.write_text(yaml.safe_dump(run))
    other = lmt("predict", tmp_path / "ladder.yaml", "--curve", "--run", file)
    assert other.exit_code == 2
    assert "mine has other data than the rungs of made (data.train_urls: " in other.output
    assert "train rungs on its data" in other.output


def test_rungs_without_curves_are_named(ladder: ModelLadder, tmp_path: Path) -> None:
    config = tmp_path / "ladder.yaml"
    (Path(ladder.get_save_folder("c")) / "metrics.jsonl").unlink()
    metrics = Path(ladder.get_save_folder("d")) / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:50]))
    done = lmt("predict", config, "--curve", "--size", "target")
    assert done.exit_code == 2
    assert "2 curves of 2 sizes do not determine" in done.output
    assert "c has no curve of train/loss" in done.output
    assert re.search(r"d ends at step 50 of \d+; train it to its end with: lmt ladder run --size d", done.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "points.csv", "--curve", "--size", "a"], "give the ladder's YAML file"),
        (["predict", "ladder.yaml", "--curve"], "--curve needs --size SIZE of the ladder, or --run CONFIG"),
        (["predict", "ladder.yaml", "--curve", "--size", "z"], "there is no size 'z'"),
        (["predict", "ladder.yaml", "--curve", "--size", "a", "--flops", "1e9"], "no --flops; remove it"),
        (["predict", "ladder.yaml", "--size", "a"], "without --curve, no --size"),
        (["register", "ladder.yaml", "--curve", "--size", "a", "--params", "1e9"], "no --params; remove it"),
        (["predict", "ladder.yaml", "--curve", "--size", "a", "--unique-tokens", "1e9"], "no --unique-tokens; remove"),
        (["register", "ladder.yaml", "--size", "a", "--run", "a.yaml"], "without --curve, no --run"),
    ],
)
def test_mistakes_are_explained(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder_of(tmp_path)
    (tmp_path / "points.csv").write_text("N,D,loss\n")
    monkeypatch.chdir(tmp_path)
    done = lmt(*arguments)
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.slow
def test_a_ladder_that_runs_predicts_its_next_size(tmp_path: Path) -> None:
    """Four trained sizes predict the curve of a fifth, which trains inside an alert that fires only for another run."""
    plain = small(tmp_path, 1)
    model = plain["model_configurator"]["models"]["3k"]
    widths = {"a": 6, "b": 8, "c": 12, "d": 16, "e": 24}
    plain["model_configurator"]["models"] = {
        name: {**model, "hidden_dim": width, "head_dim": width} for name, width in widths.items()
    }
    plain |= {"sizes": ["a", "b", "c", "d"], "run_configurator": {"chinchilla_multiple": 1}}
    (file := tmp_path / "ladder.yaml").write_text(json.dumps(plain))
    ladder = ModelLadder.model_validate(plain)
    for size in ladder.sizes:
        ladder.run(size)
    registered = run_here("ladder", "register", file, "--curve", "--size", "e")
    assert registered.returncode == 0, registered.stderr
    path = Path(ladder.dir) / "predictions" / "curves" / "e.json"
    ran = run_here("ladder", "run", file, "--size", "e", f"trainer.alerts.off_prediction.file={path}")
    assert ran.returncode == 0, ran.stderr
    ((_, score),) = score_curves(ladder)
    assert score.windows >= 20
    assert score.inside >= 0.7 * score.windows
    reported = run_here("report", ladder.get_save_folder("e"), "--out", tmp_path / "e.html")
    assert f"{score.inside} of {score.windows} windows inside the 90% band" in reported.stdout
