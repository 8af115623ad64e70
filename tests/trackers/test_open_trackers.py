"""Several trackers as one: the configuration, and that a failing tracker stops nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from lm_trainer.core.errors import UserError
from lm_trainer.trackers import (
    AnyTracker,
    NoopConfig,
    TensorboardConfig,
    TrackedRun,
    TrackerConfig,
    WandbConfig,
    open_trackers,
    read_metrics,
)

MEMBERS: tuple[type[TrackerConfig], ...] = get_args(get_args(AnyTracker)[0])
CALLS = ("log", "log_config", "log_summary", "log_text", "log_histogram", "log_alert", "log_artifact")
REQUIRED = {"jsonl": {"path": "copies"}}
PACKAGES = {"wandb", "trackio"}


class Recording:
    """Remembers its calls, and fails in those that are named."""

    def __init__(self, fails_in: tuple[str, ...] = (), error: type[BaseException] = RuntimeError):
        self.fails_in, self.error, self.calls = fails_in, error, []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            self.calls.append((name, args, kwargs))
            if name in self.fails_in:
                raise self.error(f"no {name}\nat all")

        return call

    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]


class Fake:
    """Stands in for a configuration."""

    def __init__(self, tracker: Any, type: str = "fake"):
        self.tracker, self.type = tracker, type

    def open(self, run: TrackedRun) -> Any:
        if isinstance(self.tracker, Exception):
            raise self.tracker
        return self.tracker


def call_all(trackers: Any, step: int) -> None:
    trackers.log({"train/loss": 1.0}, step=step)
    trackers.log_config({"a": 1})
    trackers.log_summary({"b": 2})
    trackers.log_text("c", "d", step=step)
    trackers.log_histogram("e", np.array([1, 2]), np.array([0.0, 1.0, 2.0]), step=step)
    trackers.log_alert("loss_spike", "the loss is 9", step=step)
    trackers.log_artifact("f", Path(__file__), type="test")


def test_names_of_artifacts_are_those_that_services_take(tmp_path):
    configs: Any = [Fake(tracker := Recording())]
    with contextlib.closing(open_trackers(configs, run_dir=tmp_path, run_id="r")) as trackers:
        trackers.log_artifact("my plots/loss (1).png", tmp_path, type="plot")
    assert tracker.calls[0][1] == ("my-plots-loss--1-.png", tmp_path)


@pytest.mark.parametrize("fails_in", CALLS)
def test_a_tracker_that_raises_is_reported_once_and_switched_off(tmp_path, caplog, fails_in):
    bad, good = Recording((fails_in, "close")), Recording()
    configs: Any = [Fake(bad, "bad"), Fake(good, "good")]
    with contextlib.closing(open_trackers(configs, run_dir=tmp_path, run_id="r")) as trackers:
        call_all(trackers, 1)
        call_all(trackers, 2)
    assert bad.names() == [*CALLS[: CALLS.index(fails_in) + 1], "close"]
    assert good.names() == [*CALLS, *CALLS, "close"]
    assert [record["step"] for record in read_metrics(tmp_path) if "alert" not in record] == [1, 2]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "bad tracker failed and is switched off" in warning
    assert f"no {fails_in} at all" in warning


def test_closing_reaches_every_tracker(tmp_path, caplog):
    bad, good = Recording(("close",)), Recording()
    configs: Any = [Fake(bad, "bad"), Fake(good, "good")]
    trackers = open_trackers(configs, run_dir=tmp_path, run_id="r")
    trackers.close()
    trackers.close()
    assert (bad.names(), good.names()) == (["close"], ["close"])
    assert "bad tracker failed" in caplog.text


def test_an_interrupt_is_not_swallowed(tmp_path):
    configs: Any = [Fake(Recording(("log",), KeyboardInterrupt))]
    trackers = open_trackers(configs, run_dir=tmp_path, run_id="r")
    with contextlib.closing(trackers), pytest.raises(KeyboardInterrupt):
        trackers.log({"x": 1.0}, step=1)


def test_a_service_that_is_down_at_the_start_is_left_out(tmp_path, caplog):
    configs: Any = [Fake(ConnectionError("no route"), "remote"), Fake(good := Recording())]
    with contextlib.closing(open_trackers(configs, run_dir=tmp_path, run_id="r")) as trackers:
        call_all(trackers, 1)
    assert good.names() == [*CALLS, "close"]
    assert "remote tracker failed" in caplog.text


def test_what_the_user_must_mend_is_raised_and_nothing_stays_open(tmp_path):
    configs: Any = [Fake(good := Recording()), Fake(UserError("install it"))]
    with pytest.raises(UserError, match="install it"):
        open_trackers(configs, run_dir=tmp_path, run_id="r")
    assert good.names() == ["close"]


def test_trackers_get_plain_numbers_and_no_passwords(tmp_path):
    import jax.numpy as jnp

    configs: Any = [Fake(tracker := Recording())]
    with contextlib.closing(open_trackers(configs, run_dir=tmp_path, run_id="r")) as trackers:
        trackers.log({"x": jnp.float32(0.5)}, step=1)
        trackers.log_config({"data": {"urls": ["https://me:hunter2@host/x.jsonl", "s3://bucket/a@b"]}, "n": 1})
    (_, (metrics,), _), (_, (config,), _) = tracker.calls[:2]
    assert type(metrics["x"]) is float
    assert config == {"data": {"urls": ["https://***@host/x.jsonl", "s3://bucket/a@b"]}, "n": 1}


def config_of_type(name: str, **fields: Any) -> Any:
    if name in PACKAGES:
        pytest.importorskip(name)
    return TypeAdapter(AnyTracker).validate_python({"type": name} | REQUIRED.get(name, {}) | fields)


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.__name__)
def test_every_kind_is_chosen_by_its_type(member):
    assert type(config_of_type(member.model_fields["type"].default)) is member


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.__name__)
def test_every_kind_takes_every_call_twice(member, in_tmp_path, caplog, monkeypatch):
    # All sources of the project are saved by the tests of W&B.
    monkeypatch.setattr("lm_trainer.trackers.wandb.git_tracked_files", lambda: {"test.py": Path(__file__)})
    config = config_of_type(member.model_fields["type"].default)
    (in_tmp_path / "run").mkdir()
    trackers = open_trackers([config], run_dir=in_tmp_path / "run", run_id="r")
    with contextlib.closing(trackers):
        call_all(trackers, 1)
        call_all(trackers, 2)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_a_missing_package_is_found_with_the_configuration(name, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("lm_trainer.trackers.base.find_spec", lambda n: None if n == name else find(n))
    with pytest.raises(
        ValidationError, match=rf"package {name} is not installed; run `pip install 'lm_trainer\[{name}"
    ):
        TypeAdapter(AnyTracker).validate_python({"type": name})


def test_only_the_first_process_writes(tmp_path):
    configs: Any = [Fake(tracker := Recording())]
    for index in (1, 0):
        trackers = open_trackers(configs, run_dir=tmp_path, run_id="r", process_index=index)
        with contextlib.closing(trackers):
            call_all(trackers, 1)
        assert bool(tracker.calls) == (tmp_path / "metrics.jsonl").exists() == (index == 0)


def test_a_list_may_be_empty_or_hold_nothing_but_the_record(tmp_path):
    for configs in ([], [NoopConfig()]):
        run_dir = tmp_path / str(len(configs))
        run_dir.mkdir()
        with contextlib.closing(open_trackers(configs, run_dir=run_dir, run_id="r")) as trackers:
            call_all(trackers, 1)
        assert {p.name for p in run_dir.iterdir()} == {
            "metrics.jsonl",
            "texts.jsonl",
            "histograms.jsonl",
            "summary.json",
        }


def test_the_configurations_of_other_files_are_read():
    pytest.importorskip("wandb")
    adapter = TypeAdapter(AnyTracker)
    wandb = adapter.validate_python({"type": "wandb", "project": "p", "entity": "e", "tags": ["a"], "save_code": False})
    assert isinstance(wandb, WandbConfig)
    assert (wandb.project, wandb.tags, wandb.id, wandb.save_xla_dumps) == ("p", ("a",), None, False)
    assert adapter.validate_python({"type": "tensorboard", "logdir": "logs"}) == TensorboardConfig(logdir="logs")
    with pytest.raises(ValidationError):
        adapter.validate_python({"type": "tensorboard", "projct": "p"})
