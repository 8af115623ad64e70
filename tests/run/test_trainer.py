"""`Trainer` with a model, a loss and a loop of one's own: a table of bigrams, against NumPy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import NonFiniteError, UserError
from lm_trainer.optim import OPTIMIZERS, OptimizerConfig
from lm_trainer.optim.sophia import SophiaGConfig
from lm_trainer.run.trainer import Trainer
from lm_trainer.run.training.hooks import StepInfo
from tests.run.own_model import OPTIMIZER, ROWS, SEQ, STEPS, VOCAB, Bigrams, Numbered, batch, loss, settings


def numpy_adam(steps: int, *, sizes: Callable[[int], int] = lambda _: ROWS) -> dict[str, np.ndarray]:
    params = {"bias": np.zeros(VOCAB), "table": np.zeros((VOCAB, VOCAB))}
    m, v = ({k: np.zeros_like(x) for k, x in params.items()} for _ in range(2))
    for step in range(steps):
        rows = batch(step, sizes(step))
        logits = params["table"][rows.tokens] + params["bias"]
        p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        d = (p - np.eye(VOCAB)[rows.targets]) / rows.tokens.size
        table = np.zeros((VOCAB, VOCAB))
        np.add.at(table, rows.tokens, d)
        for name, g in (("bias", d.sum((0, 1))), ("table", table)):
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.95 * v[name] + 0.05 * g * g
            up = m[name] / (1 - 0.9 ** (step + 1)) / (np.sqrt(v[name] / (1 - 0.95 ** (step + 1))) + 1e-2)
            params[name] = params[name] - 0.1 * up
    return params


@pytest.fixture(autouse=True)
def _run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def assert_close(params: Any, expected: dict[str, np.ndarray]) -> None:
    assert set(params) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], value, atol=1e-5, err_msg=name)


def test_a_model_and_a_loss_of_ones_own() -> None:
    calls: list[tuple[str, int]] = []
    with Trainer(settings(max_devices=None), OPTIMIZER, loss) as trainer:
        state = trainer.initial_state(model_init=Bigrams)
        trainer.add_hook(lambda info: calls.append(("often", info.step)))

        @trainer.add_hook(every=4)
        def seldom(info: StepInfo) -> None:
            calls.append(("seldom", info.step))
            assert np.isfinite(info.loss)

        trainer.add_eval_hook(Numbered(), "held-out")
        state = trainer.train(state, trainer.data_loader(Numbered()))
        file = trainer.write_artifact("notes.json", {"a": 1}, type="notes")
        assert (trainer.run_id, trainer.num_train_steps, trainer.device_mesh.size) == ("own", STEPS, 8)
        assert trainer.parameter_axis_mapping["embed"] == ("data",)
        assert "data" in trainer.compute_axis_mapping["batch"]
    assert [step for name, step in calls if name == "often"] == [1, 2, 3, 4, 5, 6]
    assert [step for name, step in calls if name == "seldom"] == [4, 6], "every fourth step, and after the last one"
    assert calls.index(("often", 4)) < calls.index(("seldom", 4)), "hooks run in the order in which they were added"
    assert_close(state.params, numpy_adam(STEPS))
    assert json.loads(file.read_text()) == {"a": 1}
    assert sorted(p.name for p in Path("checkpoints/own").glob("[0-9]*")) == ["3", "6"]

    lines = [json.loads(line) for line in Path("logs/own/metrics.jsonl").read_text().splitlines()]
    assert all(0 <= line["train/accuracy"] <= 1 for line in lines if "train/loss" in line)
    assert [line["step"] for line in lines if "eval/held-out/loss" in line] == [4, 6]


def test_the_order_of_what_follows_a_step() -> None:
    order: list[str] = []

    class HeldOut(Numbered):
        def batches(self, *args: Any, **options: Any) -> list[Batch]:
            order.append("evaluation")
            return super().batches(*args, **options)

    def hook(info: StepInfo) -> None:
        order.append(f"hook {info.step}")
        assert not list(Path("checkpoints/own").glob(f"{info.step}*")), "a checkpoint comes after the hooks"

    with Trainer(settings(num_train_steps=4), OPTIMIZER, loss) as trainer:
        trainer.add_hook(hook)
        trainer.add_eval_hook(HeldOut())
        state = trainer.initial_state(model_init=Bigrams)
        for info in trainer.training_steps(state, trainer.data_loader(Numbered())):
            order.append(f"step {info.step}")  # noqa: PERF401 - the hooks append to the same list
    assert order == ["hook 1", "step 1", "hook 2", "step 2", "hook 3", "step 3", "evaluation", "hook 4", "step 4"]
    assert sorted(p.name for p in Path("checkpoints/own").glob("[0-9]*")) == ["3", "4"]


def test_without_default_hooks_nothing_is_recorded_and_nothing_saved() -> None:
    with Trainer(settings(), OPTIMIZER, loss, add_default_hooks=False) as trainer:
        state = trainer.initial_state(model_init=Bigrams)
        state = trainer.train(state, trainer.data_loader(Numbered()))
    assert_close(state.params, numpy_adam(STEPS))
    assert not list(Path("checkpoints/own").glob("[0-9]*"))
    assert "train/loss" not in Path("logs/own/metrics.jsonl").read_text()


def test_a_loop_of_ones_own_and_a_resume() -> None:
    with Trainer(settings(num_train_steps=4), OPTIMIZER, loss) as trainer:
        state = trainer.initial_state(model_init=Bigrams, data_fingerprint="these")
        for info in trainer.training_steps(state, (batch(step) for step in range(99))):
            last = info
        assert last.step == 4
    # More steps are another run: what decides the numbers is written down with it.
    with pytest.raises(UserError, match="num_train_steps"), Trainer(settings(), OPTIMIZER, loss):
        pass
    with Trainer(settings(num_train_steps=4), OPTIMIZER, loss) as trainer:
        state = trainer.initial_state(model_init=Bigrams, data_fingerprint="these")
        assert state.step == 4
        assert_close(state.params, numpy_adam(4))
    with (
        Trainer(settings(num_train_steps=4), OPTIMIZER, loss) as trainer,
        pytest.raises(UserError, match="other data"),
    ):
        trainer.initial_state(model_init=Bigrams, data_fingerprint="others")


def test_one_step_at_a_time_and_what_is_not_trained() -> None:
    with Trainer(settings(), OPTIMIZER, loss, add_default_hooks=False) as trainer:
        model = Bigrams()
        model.bias.set_value(jnp.arange(VOCAB, dtype=jnp.float32))
        state = trainer.initial_state(model=model, is_trainable={"table": True})
        assert (set(state.params), set(state.frozen)) == ({"table"}, {"bias"})
        info = trainer.train_step(state, batch(0))
        assert info.step == 1
        np.testing.assert_array_equal(info.state.frozen["bias"], np.arange(VOCAB))
        assert np.abs(np.asarray(info.state.params["table"])).max() == pytest.approx(0.08, rel=0.25)
    with Trainer(settings(id="none"), OPTIMIZER, loss) as trainer, pytest.raises(UserError, match="no parameter"):
        trainer.initial_state(model_init=Bigrams, is_trainable=False)


def test_a_batch_that_grows_and_one_that_cannot_be_cut() -> None:
    growing = [{"start": 0, "value": 8}, {"start": 2, "value": 16}]
    with Trainer(settings(num_train_steps=4, train_batch_size=growing), OPTIMIZER, loss) as trainer:
        state = trainer.train(trainer.initial_state(model_init=Bigrams), trainer.data_loader(Numbered()))
    assert_close(state.params, numpy_adam(4, sizes=lambda step: 8 if step < 2 else 16))
    lines = [json.loads(line) for line in Path("logs/own/metrics.jsonl").read_text().splitlines()]
    totals = [line["throughput/total_tokens"] for line in lines if "train/loss" in line]
    assert totals == [SEQ * rows for rows in (8, 16, 32, 48)]

    odd = settings(id="odd", num_train_steps=2, train_batch_size=11, allow_nondivisible_batch_size=True)
    with Trainer(odd, OPTIMIZER, loss) as trainer:
        state = trainer.train(trainer.initial_state(model_init=Bigrams), trainer.data_loader(Numbered()))
    assert_close(state.params, numpy_adam(2, sizes=lambda _: 11))


def test_averaged_weights_are_the_formula_and_are_evaluated() -> None:
    weights = []
    averaging = {"type": "ema", "beta": 0.75}
    with Trainer(settings(num_train_steps=4, model_averaging=averaging), OPTIMIZER, loss) as trainer:
        trainer.add_hook(lambda info: weights.append(np.asarray(info.state.params["table"])))
        trainer.add_eval_hook(Numbered())
        state = trainer.train(trainer.initial_state(model_init=Bigrams), trainer.data_loader(Numbered()))
    expected = np.zeros((VOCAB, VOCAB))
    for table in weights:
        expected = 0.75 * expected + 0.25 * table
    assert state.averaged is not None
    np.testing.assert_allclose(state.averaged["table"], expected, atol=1e-6)
    lines = [json.loads(line) for line in Path("logs/own/metrics.jsonl").read_text().splitlines()]
    plain, averaged = ([line[key] for line in lines if key in line] for key in ("eval/loss", "eval/ema/loss"))
    assert len(plain) == len(averaged) == 1
    assert plain != averaged


def test_a_loss_that_is_not_finite_stops_the_run_and_spares_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(model: Bigrams, rows: Batch, key: jax.Array | None) -> Any:
        total, weight, metrics = loss(model, rows, key)
        return jnp.where(rows.tokens[0, 0] >= 0, total / 0, total), weight, metrics

    with Trainer(settings(), OPTIMIZER, broken) as trainer:
        state = trainer.initial_state(model_init=Bigrams)
        file = Path("logs/own/non-finite/step-1.npz")
        with pytest.raises(NonFiniteError, match=f"loss is inf.*the step was not applied; its batch is in {file}"):
            trainer.train(state, trainer.data_loader(Numbered()))
    with np.load(file) as written:
        assert {name: x.tolist() for name, x in written.items()} == {
            name: np.asarray(x).tolist() for name, x in batch(0)._asdict().items() if x is not None
        }
    skipping = settings(id="skip", crash_on_inf=False, crash_on_nan=False)
    with Trainer(skipping, OPTIMIZER, broken) as trainer:
        state = trainer.train(trainer.initial_state(model_init=Bigrams), trainer.data_loader(Numbered()))
        np.testing.assert_array_equal(state.params["table"], 0)
    assert len(list(Path("logs/skip/non-finite").glob("*.npz"))) == STEPS
    assert f"step {STEPS}: grad_norm is nan, loss is inf; the step was not applied" in capsys.readouterr().out


def test_hooks_that_cannot_be() -> None:
    with Trainer(settings(), OPTIMIZER, loss) as trainer:
        with pytest.raises(ValueError, match="positive"):
            trainer.add_hook(print, every=0)
        with pytest.raises(ValueError, match="either model or model_init"):
            trainer.initial_state()


def _optimizers() -> list[type[OptimizerConfig]]:
    # Sophia-G draws targets from a model's logits, so it needs a decoder.
    return [member for member in OPTIMIZERS if member is not SophiaGConfig]


@pytest.mark.slow
@pytest.mark.parametrize("member", _optimizers(), ids=lambda member: member.model_fields["type"].default)
def test_every_optimizer_trains_and_resumes(member: type[OptimizerConfig]) -> None:
    optimizer = member(warmup=0)
    with Trainer(settings(num_train_steps=4), optimizer, loss) as trainer:
        state = trainer.train(trainer.initial_state(model_init=Bigrams), trainer.data_loader(Numbered()))
    shutil.rmtree("checkpoints/own/4")
    with Trainer(settings(num_train_steps=4), optimizer, loss) as trainer:
        resumed = trainer.initial_state(model_init=Bigrams)
        assert resumed.step == 3
        resumed = trainer.train(resumed, trainer.data_loader(Numbered()))
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(x, y)
    assert np.abs(np.asarray(state.params["table"])).max() > 0
