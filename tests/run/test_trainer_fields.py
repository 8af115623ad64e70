"""Fields of the trainer section that `Trainer` acts on: what is kept, written, watched and started from."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import NonFiniteError, UserError
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.health.alerts.sender import Alerts
from lm_trainer.models import Gpt2Config
from lm_trainer.profile.meter import Meter
from lm_trainer.run.build.model import trace_module
from lm_trainer.run.build.setup import TrainingSetup, build_setup, plan_training
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.trainer import Trainer
from lm_trainer.run.training.bad_batches import BadBatchDump
from lm_trainer.run.training.hooks import HookFn, StepInfo
from lm_trainer.run.training.metrics import MetricLogger
from lm_trainer.run.weights.initial_weights import StartRequest, load_initial_state
from lm_trainer.run.weights.saved_model import write_model
from lm_trainer.step.state.model_def import ModelDef
from lm_trainer.step.state.train_state import TrainState
from lm_trainer.trackers import Progress, open_trackers
from tests.run.own_model import OPTIMIZER, STEPS, VOCAB, Bigrams, Numbered, batch, loss, settings


@pytest.fixture(autouse=True)
def _run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read_metrics(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


class RecordingData(Numbered):
    """Notes how many batches an evaluation may take."""

    def __init__(self) -> None:
        self.asked: list[int | None] = []

    def batches(self, batch_size: int, *, rows: Sequence[int], max_batches: int | None = None) -> list[Batch]:
        self.asked.append(max_batches)
        return super().batches(batch_size, rows=rows, max_batches=max_batches)


def train_run(*, hook: HookFn = lambda _: None, **changes: Any) -> RecordingData:
    """Trains to the end; returns what was evaluated on."""
    data = RecordingData()
    with Trainer(settings(**changes), OPTIMIZER, loss) as trainer:
        trainer.add_hook(hook)
        trainer.add_eval_hook(data)
        trainer.train(trainer.initial_state(model_init=Bigrams), trainer.data_loader(data))
    return data


def artifacts(run: str) -> set[str]:
    return {path.name for path in (Path(run) / "artifacts").glob("*")}


def test_what_is_recorded_where_and_when(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = [0]
    traces: list[Any] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda _, **options: traces.append((steps[-1], options)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: traces.append(steps[-1]))
    data = train_run(
        hook=lambda info: steps.append(info.step),
        id="named",
        log_dir="elsewhere",
        log_jaxprs=False,
        steps_per_eval=5,
        max_eval_batches=3,
        steps_per_log=2,
        profiler=True,
        profiler_start_step=2,
        profiler_num_steps=2,
        profiler_perfetto_link=True,
        watch={"interval": 3, "include_per_parameter_norms": False},
        checkpointer={"base_path": "kept", "append_run_id_to_base_path": False, "keep": [{"every": 4}]},
    )
    written = read_metrics("elsewhere/named")
    assert [line["step"] for line in written if "train/loss" in line] == [2, 4, 6]
    assert [line["step"] for line in written if "grads/norm/total" in line] == [3, 6]
    assert [line["step"] for line in written if "eval/loss" in line] == [5, 6]
    assert data.asked == [3, 3]
    assert traces == [(2, {"create_perfetto_link": True}), 4]
    assert artifacts("elsewhere/named") == {"train_step.hlo.txt"}
    assert sorted(path.name for path in Path("kept").glob("[0-9]*")) == ["4", "6"]


def test_what_is_recorded_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.profiler, "start_trace", mock.Mock(side_effect=AssertionError("nobody asked for a trace")))
    data = train_run(log_xla_hlo=False, watch={"interval": 0}, num_train_steps=3)
    written = read_metrics("logs/own")
    assert [line["step"] for line in written if "train/loss" in line] == [1, 2, 3]
    assert not [line for line in written if "grads/norm/total" in line]
    assert data.asked == [None]
    assert artifacts("logs/own") == {"train_step.jaxpr.txt"}
    assert [path.name for path in Path("checkpoints/own").glob("[0-9]*")] == ["3"]


@pytest.mark.slow
def test_the_seed_decides_the_random_numbers_of_training() -> None:
    def drawing(model: Bigrams, rows: Batch, key: jax.Array | None) -> Any:
        assert key is not None
        total, weight, _ = loss(model, rows, key)
        return total, weight, {"drawn": weight * jax.random.uniform(key)}

    def drawn(seed: int) -> float:
        model = trace_module(Bigrams, jnp.float32)
        trainer = settings(seed=seed, elastic_shards=1)
        setup = plan_training(trainer, OPTIMIZER, model, drawing, devices=jax.devices()[:1])
        setup.step.compile(batch(0))
        _, metrics = setup.step(setup.init(), setup.step.put(batch(0)), 0.1)
        return float(metrics["drawn"])

    assert drawn(1) == drawn(1) != drawn(2)


def test_an_average_that_comes_to_rest_is_the_formula() -> None:
    averaging = {"type": "ema_decay_sqrt", "beta": 0.5, "switch_step": 1, "decay_steps": 3}
    weights = []
    with Trainer(settings(num_train_steps=5, model_averaging=averaging), OPTIMIZER, loss) as trainer:
        trainer.add_hook(lambda info: weights.append(np.asarray(info.state.params["table"])))
        state = trainer.train(trainer.initial_state(model_init=Bigrams), trainer.data_loader(Numbered()))
    expected = np.zeros((VOCAB, VOCAB))
    for table, x in zip(weights, (0, 1 / 3, 2 / 3, 1, 1), strict=True):
        expected += 0.5 * (1 - x**0.5) * (table - expected)
    assert state.averaged is not None
    np.testing.assert_allclose(state.averaged["table"], expected, atol=1e-6)


def recorder(trackers: Any = None, **flags: bool) -> MetricLogger:
    trackers = trackers or open_trackers([], run_dir=".", run_id="r")
    watcher: Any = mock.Mock(report=lambda **_: [])
    meter = Meter(flops_per_token=0.0, peak_flops=None)
    evidence = BadBatchDump(Path("non-finite"))
    config, progress = settings(**flags), Progress(STEPS)
    alerts = Alerts(config.alerts, Path(), trackers, progress, sends=True)
    return MetricLogger(config, trackers, progress, meter, watcher, dict, bad_batches=evidence, alerts=alerts)


def test_a_step_takes_until_it_is_done_not_until_it_is_read() -> None:
    trackers = mock.Mock()
    logger = recorder(trackers=trackers)
    metrics = {name: jnp.float32(1) for name in ("loss", "grad_norm", "tokens")}
    for number in (1, 2):
        logger.record_step(StepInfo(TrainState(number, {}, ()), metrics, 0.1, 8, 8 * number, 0.0))
        # A wait after the first step alone, which is then the time that the second one takes.
        time.sleep(0.5 * (2 - number))
    logger.flush()
    logger.close()
    first, second = (call.args[0] for call in trackers.log.call_args_list)
    assert "throughput/step_time" not in first
    assert second["throughput/step_time"] > 0.25


@pytest.mark.parametrize(("value", "flag"), [(np.nan, "crash_on_nan"), (np.inf, "crash_on_inf")])
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_each_kind_of_bad_number_has_a_flag_of_its_own(name: str, value: float, flag: str) -> None:
    values = {"loss": 1.0, "grad_norm": 1.0, "tokens": 8.0, name: value}
    metrics = {key: jnp.float32(x) for key, x in values.items()}
    step = StepInfo(TrainState(1, {}, ()), metrics, 0.1, 8, 8, 0.0)
    other = {"crash_on_nan", "crash_on_inf"} - {flag}
    for flags in ({}, dict.fromkeys(other, False)):
        stopping = recorder(**flags)
        stopping.record_step(step)
        with pytest.raises(NonFiniteError, match=f"step 1: {name} is {value}"):
            stopping.flush()
    going_on = recorder(**{flag: False})
    going_on.record_step(step)
    going_on.flush()


class Unbiased(nnx.Module):
    """The table alone."""

    def __init__(self) -> None:
        self.table = nnx.Param(jnp.zeros((VOCAB, VOCAB)))


def unbiased(model: Unbiased, rows: Batch, key: jax.Array | None) -> Any:
    logits = model.table[...][rows.tokens]
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), rows.targets[..., None], -1)[..., 0]
    return jnp.sum(nll * rows.weights), jnp.sum(rows.weights), {}


@pytest.fixture
def other() -> np.ndarray:
    """The table of a run named `other` that has no bias, after two steps."""
    with Trainer(settings(id="other", num_train_steps=2), OPTIMIZER, unbiased) as trainer:
        state = trainer.train(trainer.initial_state(model_init=Unbiased), trainer.data_loader(Numbered()))
        return np.asarray(state.params["table"])


def start_run(model: Callable[[], nnx.Module], **changes: Any) -> TrainState:
    with Trainer(settings(**changes), OPTIMIZER, loss, add_default_hooks=False) as trainer:
        return trainer.initial_state(model_init=model)


def test_what_a_run_starts_from(other: np.ndarray, caplog: pytest.LogCaptureFixture) -> None:
    assert start_run(Unbiased).step == 0
    with pytest.raises(UserError, match=r"load_checkpoint is true, but there is no checkpoint in .*checkpoints/own"):
        start_run(Unbiased, load_checkpoint=True)
    for path in ("checkpoints/other", "checkpoints/other/2"):
        state = start_run(Unbiased, load_checkpoint_path=path, load_checkpoint=True)
        assert state.step == 2
        np.testing.assert_array_equal(state.params["table"], other)
    assert start_run(Unbiased, id="other", num_train_steps=2).step == 2
    with pytest.raises(UserError, match=r"load_checkpoint is false, but .*checkpoints/other holds checkpoints"):
        start_run(Unbiased, id="other", num_train_steps=2, load_checkpoint=False)
    assert start_run(Unbiased, load_checkpoint=False).step == 0
    with pytest.raises(UserError, match=r"params\.bias: the checkpoint has nothing"):
        start_run(Bigrams, id="biased", load_checkpoint_path="checkpoints/other")

    assert "starts afresh" not in caplog.text
    changes = {"allow_partial_checkpoint": True, "model_averaging": {"type": "ema"}}
    state = start_run(Bigrams, id="averaging", load_checkpoint_path="checkpoints/other", **changes)
    assert state.step == 2
    assert state.averaged is not None
    for weights in (state.params, state.averaged):
        np.testing.assert_array_equal(weights["table"], other)
        np.testing.assert_array_equal(weights["bias"], 0)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith("the checkpoint of step 2 lacks params.bias, averaged.bias, averaged.table, opt_state.")


def load_fresh_state(setup: TrainingSetup, **changes: Any) -> TrainState:
    """The state in which a run without checkpoints of its own starts."""
    store: Any = mock.Mock(restore=lambda *_, **__: None, steps=list)
    trainer = settings(initialize_from="weights", **changes)
    return load_initial_state(StartRequest(trainer, setup, store, setup.init, lambda _: "")).state


@pytest.mark.slow
def test_weights_may_lack_what_starts_afresh(caplog: pytest.LogCaptureFixture) -> None:
    small: dict[str, Any] = {"seq_len": 8, "hidden_dim": 8, "num_layers": 1, "num_heads": 2}
    tokenizer = ByteTokenizer()
    bare = Gpt2Config(**small, use_bias=False)
    definition = ModelDef.trace(lambda: bare.build(tokenizer.vocab_size, rngs=nnx.Rngs(3)))
    params = definition.nest(jax.jit(definition.init)())
    write_model(Path("weights"), model_config=bare, params=params, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)
    run = RunConfig(model=Gpt2Config(**small), trainer=settings())
    setup = build_setup(run, tokenizer.vocab_size, jax.devices()[:1])
    with pytest.raises(UserError, match=r"weights is another model:\n.*bias: None there"):
        load_fresh_state(setup)
    assert not caplog.records
    state = load_fresh_state(setup, allow_partial_checkpoint=True)
    assert state.step == 0
    for name, expected in definition.flatten(params).items():
        np.testing.assert_array_equal(state.params[name], expected)
    np.testing.assert_array_equal(state.params["blocks.0.mlp.up.bias"], 0)
    assert "weights lacks blocks.0.attention.k.bias, " in caplog.text
    assert "this starts afresh" in caplog.text
