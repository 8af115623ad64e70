"""The alert `off_prediction`: against the curve that was predicted, and runs that leave it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.core.registration import write_registered
from lm_trainer.health.alerts.off_prediction import OffPrediction
from lm_trainer.health.alerts.predicted_curve import CURVE_FORMAT, PredictedCurve, read_curve, score_curve
from lm_trainer.run.config.predicted_run import check_prediction, identify_curve
from lm_trainer.run.config.run_config import RunConfig, config_hash
from tests.health.test_alerts import open_alerts, read_records, train
from tests.health.test_alerts import step_metrics as metrics_of
from tests.run.own_model import settings

STEPS, WINDOW = 1000, 10
LAST = list(range(60, STEPS + 1, WINDOW))


def predicted(step: np.ndarray) -> np.ndarray:
    return 2 + 6 * step**-0.4


def curve_of(metric: str = "train/loss") -> PredictedCurve:
    value = predicted(np.array(LAST) - WINDOW / 2)
    return PredictedCurve(metric, 0.9, WINDOW, LAST, value.tolist(), (0.97 * value).tolist(), (1.03 * value).tolist())


def register(path: Path, identity: dict[str, Any] | None = None, curve: PredictedCurve | None = None) -> Path:
    identity = identity or identify_curve(RunConfig())
    write_registered(
        path, CURVE_FORMAT, {"name": "run", "identity": identity, "curve": (curve or curve_of()).as_dict()}
    )
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return register(tmp_path_factory.mktemp("registered") / "curve.json")


def alerts_at(file: Path, losses: np.ndarray, *, first: int = 1, windows: int = 3) -> list[int]:
    check = OffPrediction(file=str(file), windows=windows).build_check()
    steps = range(first, len(losses) + 1)
    return [step for step in steps if check({"step": step, "train/loss": float(losses[step - 1])}) is not None]


def noisy(seed: int = 0, spread: float = 0.04) -> np.ndarray:
    steps = np.arange(1, STEPS + 1)
    return predicted(steps) * np.exp(spread * np.random.default_rng(seed).standard_normal(STEPS))


def test_the_true_curve_never_alerts(file: Path) -> None:
    assert alerts_at(file, predicted(np.arange(1, STEPS + 1))) == []
    assert [alerts_at(file, noisy(seed)) for seed in range(20)] == [[]] * 20


@pytest.mark.parametrize("windows", [1, 3, 5])
@pytest.mark.parametrize("factor", [1.2, 0.8, float("nan"), float("inf")])
def test_a_run_that_leaves_its_band_alerts_after_the_stated_windows(file: Path, windows: int, factor: float) -> None:
    losses = predicted(np.arange(1, STEPS + 1))
    losses[500:] *= factor
    # The window of steps 501 to 510 is the first outside.
    assert alerts_at(file, losses, windows=windows)[0] == 500 + windows * WINDOW


def test_single_bad_steps_and_short_excursions_do_not_alert(file: Path) -> None:
    losses = predicted(np.arange(1, STEPS + 1))
    losses[::50] *= 1.2
    losses[300:320] *= 1.5
    assert alerts_at(file, losses) == []
    losses[300:330] *= 1.5
    assert alerts_at(file, losses) == [330]


def test_steps_before_the_first_window_and_after_the_last_do_not_count(file: Path) -> None:
    losses = predicted(np.arange(1, STEPS + 101))
    losses[:50] *= 9
    losses[STEPS:] *= 9
    assert alerts_at(file, losses) == []


def test_an_attempt_may_begin_within_a_window(file: Path) -> None:
    losses = 2 * predicted(np.arange(1, STEPS + 1))
    # Half of the window of steps 501 to 510 is enough, less is not.
    assert alerts_at(file, losses, first=506)[0] == 530
    assert alerts_at(file, losses, first=507)[0] == 540


def test_the_message_says_where_and_what_was_predicted(file: Path) -> None:
    check = OffPrediction(file=str(file), windows=1).build_check()
    messages = [check({"step": step, "train/loss": 9.0}) for step in range(1, 61)]
    assert messages[:-1] == [None] * 59
    low, high, digest = curve_of().low[0], curve_of().high[0], read_curve(file).sha256
    assert messages[-1] is not None
    band = f"above its predicted band of {low:.4f} to {high:.4f}, and outside it for 10 steps"
    assert messages[-1].startswith(f"the loss is 9.0000 in steps 51 to 60, {band}")
    assert digest[:12] in messages[-1]


def test_the_score_counts_windows(file: Path) -> None:
    curve, steps = curve_of(), np.arange(1, STEPS + 1)
    losses = predicted(steps)
    whole = score_curve(curve, steps, losses)
    assert (whole.windows, whole.inside, whole.first_outside, whole.step) == (len(LAST), len(LAST), None, STEPS)
    assert whole.error == pytest.approx(0, abs=1e-3)
    losses[800:] *= 1.1
    part = score_curve(curve, steps[:905], losses[:905])
    assert (part.windows, part.inside, part.first_outside, part.step) == (85, 75, 810, 900)
    assert part.error == pytest.approx(1 / 1.1 - 1, abs=1e-3)
    # Every hundredth step was logged: most windows have no step.
    sparse = score_curve(curve, steps[99::100], losses[99::100])
    assert (sparse.windows, sparse.inside) == (10, 8)
    nothing = score_curve(curve, np.array([]), np.array([]))
    assert (nothing.windows, nothing.error) == (0, None)
    assert "not measured yet" in nothing.describe(read_curve(file))


def test_an_alert_reaches_the_terminal_with_its_step(file: Path, tmp_path: Path) -> None:
    alerts, screen = open_alerts(tmp_path, off_prediction={"file": str(file), "windows": 1}, quiet_steps=1)
    for step in range(1, 70):
        alerts.check_step(step, metrics_of(9.0), {})
    alerts.close()
    assert "alert: step 60: the loss is 9.0000 in steps 51 to 60" in screen.getvalue()
    assert screen.getvalue().count("(off_prediction)") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainer": {"train_batch_size": 64}}, r"trainer.train_batch_size: was 512, now 64"),
        ({"trainer": {"num_train_steps": 77}}, r"trainer.num_train_steps: was \d+, now 77"),
        ({"data": {"train_urls": "other.txt"}}, r"data.train_urls: was .*, now .*other.txt"),
        ({"optimizer": {"type": "adam", "learning_rate": 0.1}}, r"optimizer.learning_rate: was 0.0006, now 0.1"),
        ({"model": {"type": "gpt2", "num_layers": 3}}, r"model.num_layers: was \d+, now 3"),
    ],
)
def test_another_run_than_the_predicted_one_is_refused(file: Path, change: dict[str, object], message: str) -> None:
    plain = {"trainer": {"alerts": {"off_prediction": {"file": str(file)}}}}
    check_prediction(RunConfig.model_validate(plain))
    merged = {**change, "trainer": {**plain["trainer"], **change.get("trainer", {})}}  # type: ignore[dict-item]
    with pytest.raises(UserError, match=message) as refused:
        check_prediction(RunConfig.model_validate(merged))
    assert "\n" not in str(refused.value)
    assert "lmt ladder register --curve" in str(refused.value)


def test_keys_without_influence_on_the_curve_may_differ(file: Path) -> None:
    section = {"alerts": {"off_prediction": {"file": str(file)}}, "seed": 7, "steps_per_eval": 5, "id": "other"}
    changed = RunConfig.model_validate({"trainer": section})
    check_prediction(changed)
    # A prediction makes no other run.
    without = RunConfig.model_validate({"trainer": {**section, "alerts": {}}})
    assert config_hash(changed) == config_hash(without)


def test_a_file_that_is_no_registered_curve(tmp_path: Path, file: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.json: no registered prediction"):
        OffPrediction(file=str(tmp_path / "nowhere.json")).build_check()
    changed = tmp_path / "changed.json"
    changed.write_text(file.read_text().replace('"window": 10', '"window": 11'))
    with pytest.raises(UserError, match=r"changed.json was changed after it was registered"):
        read_curve(changed)
    write_registered(tmp_path / "other.json", "another kind", {})
    with pytest.raises(UserError, match=r"other.json: a registered prediction of another kind"):
        read_curve(tmp_path / "other.json")
    with pytest.raises(UserError, match="choose another --out"):
        register(tmp_path / "other.json")


def test_a_loop_of_your_own_alerts_too(tmp_path: Path) -> None:
    low = PredictedCurve("train/loss", 0.9, 2, [4, 6, 8, 10, 12], [0.1] * 5, [0.0] * 5, [0.2] * 5)
    trainer = {"num_train_steps": 12, "train_batch_size": settings().train_batch_size}
    other = register(tmp_path / "other.json", {"trainer": {**trainer, "num_train_steps": 13}}, low)
    with pytest.raises(UserError, match=r"trainer.num_train_steps: was 13, now 12"):
        train(tmp_path / "refused", off_prediction={"file": str(other)})
    assert not (tmp_path / "refused" / "refused").exists()
    own = register(tmp_path / "own.json", {"trainer": trainer}, low)
    train(tmp_path / "run", off_prediction={"file": str(own), "windows": 2})
    alerts = [line for line in read_records(tmp_path / "run") if "alert" in line]
    assert [(line["step"], line["alert"]) for line in alerts] == [(6, "off_prediction")]
