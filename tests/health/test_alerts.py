"""Alerts: each kind against series that call for it and others that do not, their way to people, rules that stop."""

from __future__ import annotations

import io
import json
import stat
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from pydantic import ValidationError

from lm_trainer.core.errors import NonFiniteError, UserError
from lm_trainer.health.alerts import AlertsConfig
from lm_trainer.health.alerts.base import AlertKind, RobustWindow
from lm_trainer.health.alerts.data_wait import DataWait
from lm_trainer.health.alerts.divergence import Divergence
from lm_trainer.health.alerts.expert_load import ExpertLoad
from lm_trainer.health.alerts.grad_norm import GradNorm
from lm_trainer.health.alerts.loss_spike import LossSpike
from lm_trainer.health.alerts.memory import DeviceMemory
from lm_trainer.health.alerts.non_finite import NonFinite
from lm_trainer.health.alerts.rules import RuleStop, build_rule_check
from lm_trainer.health.alerts.sender import Alerts
from lm_trainer.health.alerts.step_time import StepTime
from lm_trainer.health.watchdog import Watchdog, WatchdogConfig
from lm_trainer.optim import AdamConfig
from lm_trainer.run.config.run_config import RunConfig, config_hash
from lm_trainer.run.trainer import Trainer
from lm_trainer.trackers import Progress, open_trackers
from tests.run.own_model import OPTIMIZER, Bigrams, Numbered, loss, settings


def noisy_series(level: float, count: int, spread: float = 0.05) -> list[float]:
    return [float(x) for x in level + spread * np.random.default_rng(0).standard_normal(count)]


def falling_loss(count: int) -> list[float]:
    """A loss as of a run that goes well."""
    steps = np.arange(count)
    noise = 0.05 * np.random.default_rng(1).standard_normal(count)
    return [float(x) for x in 3 + 7 * np.exp(-steps / 50) + noise]


def alerts_at(kind: AlertKind, series: Iterable[float], name: str) -> list[int]:
    check = kind.build_check()
    return [step for step, value in enumerate(series) if check({name: value}) is not None]


def test_the_robust_score_is_the_formula() -> None:
    window, values = RobustWindow(5, min_count=3), [1.0, 2.0, 4.0, 7.0, 100.0, 3.0]
    assert window.z_score(1.0) is None
    for value in values:
        window.add(value)
    window.add(float("nan"))
    last = np.array(values[1:])
    spread = 1.4826 * np.median(np.abs(last - np.median(last)))
    assert window.z_score(9.0) == pytest.approx((9.0 - np.median(last)) / spread)


@pytest.mark.parametrize(
    ("kind", "name", "series", "expected"),
    [
        (LossSpike(), "train/loss", falling_loss(1000), []),
        (LossSpike(), "train/loss", [*noisy_series(3, 200), 4.0, *noisy_series(3, 50)], [200]),
        (LossSpike(), "train/loss", [9.0, *noisy_series(3, 30), 4.0], []),
        (LossSpike(), "train/loss", [*noisy_series(3, 200), float("nan"), *noisy_series(3, 50)], []),
        (Divergence(), "train/loss", falling_loss(1000), []),
        (Divergence(), "train/loss", [*noisy_series(3, 100), 9.0, *noisy_series(3, 100)], []),
        (Divergence(), "train/loss", [*noisy_series(3, 100), *[3.9] * 30], [125, 126, 127, 128, 129]),
        # From the first steps on, before the window is full.
        (Divergence(), "train/loss", [*noisy_series(5.5, 12), *[188_631.0] * 10], [16, 17, 18, 19, 20, 21]),
        (Divergence(), "train/loss", [*noisy_series(5.5, 12), *[6.8] * 10], []),
        (Divergence(), "train/loss", noisy_series(5.5, 49, 0.5), []),
        (GradNorm(), "optim/grad_norm", [*noisy_series(1, 200), 3.0], []),
        (GradNorm(), "optim/grad_norm", [*noisy_series(1, 200), 30.0, 1.0], [200]),
        (GradNorm(), "optim/grad_norm", [float(x) for x in np.exp(noisy_series(0, 500, 1.0))], []),
        (StepTime(), "throughput/step_time", [1.0] * 500, []),
        (StepTime(), "throughput/step_time", [1.0] * 200 + [9.0] + [1.0] * 20, []),
        (StepTime(), "throughput/step_time", [0.01] * 200 + [0.04] * 30, []),
        (DataWait(), "throughput/data_wait", [0.9] * 100 + [0.1] * 10, []),
        (DataWait(), "throughput/data_wait", [0.0] * 100 + [0.1, 0.3], [101]),
        (ExpertLoad(), "train/router_batch_overload", [9.0] * 200 + [3.9] * 200, []),
        (ExpertLoad(after=0, steps=3), "train/router_batch_overload", [9.0, 9.0, 1.0, 9.0, 9.0, 4.0], [5]),
        (ExpertLoad(after=2, steps=2), "train/router_unused_experts", [1.0, 1.0, 1.0, 1.0, 0.5], [3]),
    ],
)
def test_kinds(kind: AlertKind, name: str, series: list[float], expected: list[int]) -> None:
    assert alerts_at(kind, series, name) == expected


def test_steps_that_take_twice_as_long_for_a_while() -> None:
    alert_steps = alerts_at(StepTime(), [1.0] * 200 + [2.5] * 30, "throughput/step_time")
    # The median of 20 turns when half of them are slow.
    assert alert_steps == list(range(210, 230))


def test_what_is_not_finite() -> None:
    check = NonFinite().build_check()
    assert check({"train/loss": 1.0, "optim/grad_norm": 1.0}) is None
    assert check({"train/loss": float("nan"), "optim/grad_norm": 1.0}) == "train/loss is nan"


def test_memory_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [mock.Mock(memory_stats=lambda: {"peak_bytes_in_use": 97, "bytes_limit": 100})]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    check = DeviceMemory().build_check()
    assert [check({}), check({})] == ["97.0% of a device's memory was in use at its highest", None]
    monkeypatch.undo()
    # A CPU cannot tell.
    assert DeviceMemory().build_check()({}) is None


def write_program(directory: Path, text: str) -> str:
    path = directory / "notify"
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def open_alerts(directory: Path, **config: Any) -> tuple[Alerts, io.StringIO]:
    screen = io.StringIO()
    trackers = open_trackers([], run_dir=directory, run_id="r")
    return Alerts(AlertsConfig(**config), directory, trackers, Progress(9, stream=screen), sends=True), screen


def step_metrics(loss: float) -> Mapping[str, float]:
    return {"train/loss": loss, "optim/grad_norm": 1.0}


def test_an_alert_goes_to_the_terminal_the_file_and_the_command(tmp_path: Path) -> None:
    sent_file = tmp_path / "told.json"
    alerts, screen = open_alerts(tmp_path, command=f"{write_program(tmp_path, f'cat > {sent_file}')} --to me")
    alerts.check_step(7, step_metrics(float("inf")), {"throughput/step_time": 0.5})
    alerts.close()
    assert "alert: step 7: train/loss is inf (non_finite)" in screen.getvalue()
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (record["step"], record["alert"], record["message"]) == (7, "non_finite", "train/loss is inf")
    sent = json.loads(sent_file.read_text())
    assert (sent["run"], sent["step"], sent["alert"]) == (tmp_path.name, 7, "non_finite")
    assert sent["metrics"] == {"train/loss": "Infinity", "optim/grad_norm": 1.0, "throughput/step_time": 0.5}


def test_a_kind_is_silent_for_a_while_after_an_alert(tmp_path: Path) -> None:
    alerts, screen = open_alerts(tmp_path, quiet_steps=10)
    for step in range(1, 25):
        alerts.check_step(step, step_metrics(float("nan")), {})
    assert [line.split(":")[1] for line in screen.getvalue().splitlines()] == [" step 1", " step 12", " step 23"]


def test_a_kind_may_be_off(tmp_path: Path) -> None:
    alerts, screen = open_alerts(tmp_path, non_finite=None)
    alerts.check_step(1, step_metrics(float("nan")), {})
    assert screen.getvalue() == ""


def test_a_slow_command_holds_nothing_up(tmp_path: Path) -> None:
    waits = f"cd {tmp_path}; for i in {{1..600}}; do [ -e go ] && break; sleep 0.05; done; touch done"
    alerts, _ = open_alerts(tmp_path, command=write_program(tmp_path, waits))
    alerts.check_step(1, step_metrics(float("nan")), {})
    assert not (tmp_path / "done").exists()
    (tmp_path / "go").touch()
    alerts.close()
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize(("text", "reason"), [("echo no network >&2; exit 4", "no network"), (None, "No such file")])
def test_a_command_that_fails_is_told_once(tmp_path: Path, text: str | None, reason: str) -> None:
    command = "nowhere-to-be-found" if text is None else write_program(tmp_path, text)
    alerts, screen = open_alerts(tmp_path, command=command, quiet_steps=1)
    for step in (1, 3, 5):
        alerts.check_step(step, step_metrics(float("nan")), {})
        time.sleep(0.1)
    alerts.close()
    assert screen.getvalue().count("trainer.alerts.command failed and is switched off") == 1
    assert reason in screen.getvalue()


def test_the_watchdog_alerts(tmp_path: Path) -> None:
    sent_file = tmp_path / "told.json"
    alerts, _ = open_alerts(tmp_path, command=write_program(tmp_path, f"cat > {sent_file}"))
    clock_time = [0.0]
    watchdog = Watchdog(WatchdogConfig(), tmp_path, clock=lambda: clock_time[0])
    watchdog.on_stall = alerts.handle_stall
    watchdog.arm("step 4")
    for clock_time[0] in range(0, 700, 10):
        watchdog.check()
    alerts.check_step(4, step_metrics(1.0), {})
    alerts.close()
    assert json.loads(sent_file.read_text())["message"] == "no progress for 600 s, waiting for step 4"
    assert '"alert": "no_progress"' in (tmp_path / "metrics.jsonl").read_text()


def test_a_line_of_a_shell_is_refused_with_what_to_write() -> None:
    with pytest.raises(ValidationError, match=r">> is for a shell, .*write: sh -c 'cat >> told'"):
        AlertsConfig(command="cat >> told")
    assert AlertsConfig(command="sh -c 'cat >> told'").command == "sh -c 'cat >> told'"


class TestRules:
    def test_so_many_steps_in_a_row(self) -> None:
        check = build_rule_check(AlertsConfig(stop=({"above": 5, "steps": 3},)).stop)  # type: ignore[arg-type]
        for step, value in enumerate([6, 6, 5, 6, float("nan")]):
            check(step, {"train/loss": value})
        with pytest.raises(RuleStop, match="step 5: train/loss is 7, and has been above 5 for 3 steps") as stopped:
            check(5, {"train/loss": 7})
        assert stopped.value.exit_code == 3

    def test_a_metric_that_is_not_there_is_an_error(self) -> None:
        check = build_rule_check(AlertsConfig(stop=({"metric": "loss", "above": 5},)).stop)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="no metric 'loss'; there are: train/loss"):
            check(1, {"train/loss": 1.0})

    def test_a_rule_needs_a_value(self) -> None:
        with pytest.raises(ValidationError):
            AlertsConfig(stop=({"steps": 3},))  # type: ignore[arg-type]


def train(directory: Path, steps: int = 12, optimizer: AdamConfig = OPTIMIZER, **alerts: Any) -> Any:
    config = settings(id=directory.name, log_dir=str(directory), num_train_steps=steps, alerts=alerts)
    config = config.model_copy(
        update={"checkpointer": config.checkpointer.model_copy(update={"base_path": str(directory)})}
    )
    with Trainer(config, optimizer, loss) as trainer:
        return trainer.train(trainer.initial_state(model_init=Bigrams), trainer.data_loader(Numbered()))


EAGER = {"loss_spike": {"window": 4, "threshold": 0.1}, "quiet_steps": 1}


@pytest.mark.slow
def test_alerts_change_no_bit_of_a_run(tmp_path: Path) -> None:
    eager = train(tmp_path / "eager", **EAGER, command=write_program(tmp_path, "cat > /dev/null"))
    off = train(tmp_path / "off", loss_spike=None, divergence=None, grad_norm=None)
    alert_lines = [line for line in read_records(tmp_path / "eager") if "alert" in line]
    assert alert_lines
    assert not [line for line in read_records(tmp_path / "off") if "alert" in line]
    for name, values in eager.params.items():
        np.testing.assert_array_equal(values, off.params[name])
    fingerprints = [
        [line["fingerprint"] for line in read_records(tmp_path / run) if "fingerprint" in line]
        for run in ("eager", "off")
    ]
    assert fingerprints[0] == fingerprints[1] != []


def test_a_rule_ends_a_run_with_the_checkpoints_of_before(tmp_path: Path) -> None:
    with pytest.raises(RuleStop, match="step 5"):
        train(tmp_path / "run", stop=[{"metric": "train/loss", "above": 0.0, "steps": 5}])
    assert [int(path.name) for path in (tmp_path / "run" / "run").glob("[0-9]*")] == [3]
    assert [line["alert"] for line in read_records(tmp_path / "run") if "alert" in line] == ["stop"]


def test_a_run_that_ends_by_nan_alerts_as_well(tmp_path: Path) -> None:
    diverging = OPTIMIZER.model_copy(update={"learning_rate": 1e38, "epsilon": 1e-30})
    with pytest.raises(NonFiniteError):
        train(tmp_path / "run", optimizer=diverging)
    assert [line["alert"] for line in read_records(tmp_path / "run") if "alert" in line] == ["non_finite"]


def read_records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / run.name / "metrics.jsonl").read_text().splitlines()]


def test_alerts_make_no_other_run() -> None:
    changed = RunConfig.model_validate({"trainer": {"alerts": {"command": "x", "stop": [{"above": 3}]}}})
    assert config_hash(changed) == config_hash(RunConfig())
