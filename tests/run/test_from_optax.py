"""`Trainer` with a transformation of optax, against a plain loop of optax."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.optim import AdamConfig, Optimizer, from_optax
from lm_trainer.run.trainer import Trainer
from lm_trainer.step.loss.gradient import LossFn
from lm_trainer.step.state.train_state import TrainState
from tests.run.own_model import OPTIMIZER, STEPS, VOCAB, Bigrams, Numbered, batch, loss, settings


def make_chain() -> optax.GradientTransformation:
    """A chain with a norm over all parameters, a schedule, a mask and state of several kinds."""
    rate = optax.cosine_decay_schedule(0.1, STEPS)
    decays = lambda params: {name: x.ndim > 1 for name, x in params.items()}  # noqa: E731
    return optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(rate, eps=1e-2, weight_decay=0.3, mask=decays))


def plain_loop(tx: optax.GradientTransformation, steps: int) -> dict[str, jax.Array]:
    """The parameters after `steps` steps of optax alone."""
    params = {"table": jnp.zeros((VOCAB, VOCAB)), "bias": jnp.zeros(VOCAB)}
    state = tx.init(params)

    def mean(params: Any, tokens: Any, targets: Any) -> jax.Array:
        logits = params["table"][tokens] + params["bias"][None, None, :]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    @jax.jit
    def step(params: Any, state: Any, tokens: Any, targets: Any) -> Any:
        updates, state = tx.update(jax.grad(mean)(params, tokens, targets), state, params)
        return optax.apply_updates(params, updates), state

    for number in range(steps):
        params, state = step(params, state, batch(number).tokens, batch(number).targets)
    return params


class Factored(nnx.Module):
    """Bigrams by two factors, the first of which lies in pieces on the devices."""

    def __init__(self) -> None:
        one, other = jax.random.split(jax.random.key(0))
        self.rows = nnx.Param(jax.random.normal(one, (VOCAB, 8)), logical_axes=("vocab", "embed"))
        self.columns = nnx.Param(jax.random.normal(other, (8, VOCAB)))


def factored_loss(model: Factored, rows: Batch, key: jax.Array | None) -> tuple[jax.Array, jax.Array, dict]:
    del key
    logits = model.rows[...][rows.tokens] @ model.columns[...]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, rows.targets)
    return jnp.sum(nll * rows.weights), jnp.sum(rows.weights), {}


def run(optimizer: Optimizer, model: Any = Bigrams, loss: LossFn = loss, **changes: Any) -> TrainState:
    with Trainer(settings(**changes), optimizer, loss) as trainer:
        return trainer.train(trainer.initial_state(model_init=model), trainer.data_loader(Numbered()))


def read_metrics() -> list[dict[str, Any]]:
    lines = map(json.loads, Path("logs/own/metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "train/loss" in line]


def assert_equal_states(one: TrainState, other: TrainState) -> None:
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.fixture(autouse=True)
def _run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("mode", ["elastic", "fast"])
def test_it_trains_as_a_loop_of_optax_alone(mode: str) -> None:
    state = run(from_optax("chain", make_chain()), determinism=mode)
    expected = plain_loop(make_chain(), STEPS)
    for name, value in expected.items():
        np.testing.assert_allclose(state.params[name], value, atol=1e-5, err_msg=name)
    assert np.abs(expected["table"]).max() > 0.1
    assert not any("optim/learning_rate" in line for line in read_metrics()), "the transformation keeps its own"


@pytest.mark.slow
def test_a_run_goes_on_with_equal_bits() -> None:
    uninterrupted = run(from_optax("chain", make_chain()))
    shutil.rmtree(f"checkpoints/own/{STEPS}")
    with Trainer(settings(), from_optax("chain", make_chain()), loss) as trainer:
        state = trainer.initial_state(model_init=Bigrams)
        assert 0 < state.step < STEPS
        assert_equal_states(trainer.train(state, trainer.data_loader(Numbered())), uninterrupted)


def test_the_bits_are_the_same_on_one_and_four_devices_and_state_lies_like_its_parameter() -> None:
    states = [
        run(
            from_optax("chain", make_chain()),
            Factored,
            factored_loss,
            id=f"on-{devices}",
            max_devices=devices,
            num_train_steps=3,
        )
        for devices in (1, 4)
    ]
    assert_equal_states(*states)
    moments: Any = optax.tree_utils.tree_get(states[1].opt_state, "mu")
    assert moments["rows"].sharding == states[1].params["rows"].sharding
    assert moments["rows"].addressable_shards[0].data.shape == (VOCAB, 2)
    assert moments["columns"].sharding.is_fully_replicated


class TestResuming:
    def test_under_another_name(self) -> None:
        run(from_optax("chain", make_chain()), num_train_steps=2)
        with pytest.raises(UserError, match=r'optimizer.name: was "chain", now "other"'):
            run(from_optax("other", make_chain()), num_train_steps=2)

    def test_with_state_of_another_structure(self) -> None:
        run(from_optax("chain", make_chain()), num_train_steps=2)
        with pytest.raises(UserError, match=r"another optimizer:\n.*opt_state.*nothing"):
            run(from_optax("chain", optax.sgd(0.1, momentum=0.9)), num_train_steps=2)

    def test_as_one_of_our_own_optimizers(self) -> None:
        run(from_optax("chain", make_chain()), num_train_steps=2)
        with pytest.raises(UserError, match=r'optimizer.type: was "optax", now "adam"'):
            run(OPTIMIZER, num_train_steps=2)


def test_hyperparameters_in_the_state_report_the_learning_rate() -> None:
    rate = optax.linear_schedule(0.1, 0.0, STEPS)
    run(from_optax("injected", optax.inject_hyperparams(optax.sgd)(rate)))
    learning_rates = [line["optim/learning_rate"] for line in read_metrics()]
    np.testing.assert_allclose(learning_rates, [0.1 * (1 - step / STEPS) for step in range(STEPS)], rtol=1e-6)


def test_labels_of_parameters_are_found_by_a_function_of_their_names() -> None:
    parts: Any = {"large": optax.adam(0.1), "small": optax.set_to_zero()}
    labels = lambda params: {name: "small" if name == "bias" else "large" for name in params}  # noqa: E731
    state = run(from_optax("parts", optax.multi_transform(parts, labels)), num_train_steps=2)
    np.testing.assert_array_equal(state.params["bias"], 0)
    assert np.abs(np.asarray(state.params["table"])).max() > 0.1


def test_a_transformation_that_asks_for_the_value_gets_the_loss() -> None:
    def update(updates: Any, state: Any, params: Any = None, *, value: jax.Array, **extra_args: Any) -> tuple[Any, Any]:
        del params, extra_args
        return updates, value + jnp.zeros_like(state)

    start: Any = lambda _: jnp.zeros(())  # noqa: E731
    recorder: Any = optax.GradientTransformationExtraArgs(start, update)  # pyright: ignore[reportArgumentType]
    state = run(from_optax("seen", optax.chain(recorder, optax.sgd(0.1))))
    held: Any = state.opt_state
    assert float(held[0]) == read_metrics()[-1]["train/loss"] > 0


def test_random_numbers_of_a_transformation_go_on_too() -> None:
    noise = optax.chain(optax.add_noise(0.1, 0.1, 0), optax.sgd(0.1))
    uninterrupted = run(from_optax("noise", noise))
    # Through jit as in the run, so that each step draws what optax alone draws.
    for name, value in plain_loop(noise, STEPS).items():
        np.testing.assert_allclose(uninterrupted.params[name], value, atol=1e-5, err_msg=name)
    shutil.rmtree(f"checkpoints/own/{STEPS}")
    with Trainer(settings(), from_optax("noise", noise), loss) as trainer:
        state = trainer.initial_state(model_init=Bigrams)
        assert state.step == STEPS // 2
        assert_equal_states(trainer.train(state, trainer.data_loader(Numbered())), uninterrupted)


@pytest.mark.parametrize("wrong", [optax.adam, AdamConfig(), None])
def test_what_is_no_transformation(wrong: Any) -> None:
    with pytest.raises(UserError, match=r"expected a transformation of optax, such as optax.adamw\(1e-3\), not"):
        from_optax("mine", wrong)


def test_a_name_is_needed() -> None:
    with pytest.raises(UserError, match="a name of your choice"):
        from_optax("", optax.adam(0.1))


def test_a_bare_transformation_is_refused_with_the_call_that_takes_it() -> None:
    bare: Any = optax.adam(0.1)
    with pytest.raises(UserError, match=r"from_optax\(NAME, TRANSFORMATION\)"):
        Trainer(settings(), bare, loss)
