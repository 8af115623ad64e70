"""`log` in layers and losses, against NumPy."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import NonFiniteError, UserError
from lm_trainer.nn.log import log
from lm_trainer.optim import AdamConfig
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.model import trace_module
from lm_trainer.run.build.setup import TrainingSetup, plan_training
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.trainer import Trainer
from lm_trainer.step.dispatch.executable import Executable
from lm_trainer.step.loss.gradient import loss_and_gradient
from tests.run.own_model import OPTIMIZER, STEPS, Numbered, settings
from tests.run.own_model import Bigrams as PlainBigrams
from tests.run.own_model import batch as numbered_batch
from tests.run.own_model import loss as plain_loss

VOCAB, ROWS, LENGTH, DIM, LAYERS, SHARDS = 16, 8, 8, 4, 4, 4
BATCH = random_batch(ROWS, LENGTH, VOCAB)._replace(
    weights=np.random.default_rng(1).choice([0.0, 0.5, 1.0], (ROWS, LENGTH)).astype(np.float32)
)
Mode = Literal["scan", "unrolled", "checkpoint", "pairs", "nested"]


class Stack(nnx.Module):
    """Layers of tanh(x w), run in one of several ways; each logs the root mean square of its results."""

    def __init__(self, mode: Mode = "checkpoint") -> None:
        rng = np.random.default_rng(0)
        self.mode = mode
        self.table = nnx.Param(jnp.asarray(rng.standard_normal((VOCAB, DIM)), jnp.float32))
        self.layers = nnx.Param(jnp.asarray(rng.standard_normal((LAYERS, DIM, DIM)), jnp.float32))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x, w = self.table[...][tokens], self.layers[...]
        match self.mode:
            case "unrolled":
                for i in range(LAYERS):
                    x, _ = layer(x, w[i])
            case "scan":
                x, _ = jax.lax.scan(layer, x, w)
            case "checkpoint":
                x, _ = jax.lax.scan(jax.checkpoint(layer), x, w)
            case "pairs":
                apply_pair = lambda x, pair: layer(layer(x, pair[0])[0], pair[1])  # noqa: E731
                x, _ = jax.lax.scan(apply_pair, x, w.reshape(2, 2, DIM, DIM))
            case "nested":
                inner = jax.checkpoint(lambda x, w: jax.lax.scan(jax.checkpoint(layer), x, w))
                x, _ = jax.lax.scan(inner, x, w[:2, None])
                for i in range(2, LAYERS):
                    x, _ = jax.jit(layer)(x, w[i])
        return x @ self.table[...].T


def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    x = jnp.tanh(x @ w)
    log("stack/rms", jnp.sqrt(jnp.mean(jnp.square(x))), each=True)
    return x, None


def loss(model: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    del key
    logits = model(jnp.asarray(batch.tokens))
    log("right", jnp.sum((jnp.argmax(logits, -1) == batch.targets) * batch.weights), reduce="sum")
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(batch.targets)[..., None], -1)[..., 0]
    return jnp.sum(nll * batch.weights), jnp.sum(batch.weights), {"first": jnp.sum(batch.weights[:, 0])}


def plan(
    build: Callable[[], nnx.Module] = Stack, loss: Any = loss, *, devices: int = 1, **changes: Any
) -> TrainingSetup:
    config = TrainerConfig.model_validate(
        {"train_batch_size": ROWS, "num_train_steps": 2, "elastic_shards": SHARDS, **changes}
    )
    return plan_training(config, AdamConfig(), trace_module(build, jnp.float32), loss, devices=jax.devices()[:devices])


def first_step(setup: TrainingSetup, batch: Batch = BATCH, weights: Any = None) -> dict[str, float]:
    setup.step.compile(batch)
    _, metrics = setup.take_step(setup.init() if weights is None else setup.from_weights(weights), batch)
    return {name: float(x) for name, x in metrics.items()}


def expected_values(*microbatches: Sequence[int]) -> dict[str, float]:
    """The values to be logged of microbatches of these rows, in NumPy and float64: means by the weights of each."""
    model = Stack()
    table, w = (np.asarray(x[...], np.float64) for x in (model.table, model.layers))
    rms, right = np.zeros(LAYERS), 0.0
    for rows in microbatches or np.split(np.arange(ROWS), SHARDS):
        part = jax.tree.map(lambda x, rows=rows: x[list(rows)], BATCH)
        x = table[part.tokens]
        for i in range(LAYERS):
            x = np.tanh(x @ w[i])
            rms[i] += np.sqrt(np.mean(x**2)) * part.weights.sum()
        right += (((x @ table.T).argmax(-1) == part.targets) * part.weights).sum()
    total = BATCH.weights.sum()
    assert len({*rms}) == LAYERS
    return {
        "stack/rms": float(rms.mean() / total),
        "right": float(right / total),
        **{f"stack/rms/{i}": float(x / total) for i, x in enumerate(rms)},
    }


def drop_step_metrics(metrics: dict[str, float]) -> dict[str, float]:
    return {name: x for name, x in metrics.items() if name not in ("loss", "grad_norm", "tokens", "first")}


@pytest.fixture(autouse=True)
def _run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("mode", get_args(Mode))
def test_values_are_those_of_numpy_however_the_layers_run(mode: Mode) -> None:
    metrics = first_step(plan(functools.partial(Stack, mode)))
    assert drop_step_metrics(metrics) == pytest.approx(expected_values(), rel=1e-5)


def test_evaluation_logs_too() -> None:
    setup = plan(per_device_eval_parallelism=2)
    metrics = setup.evaluate(setup.init().params, [BATCH])
    assert drop_step_metrics(metrics) == pytest.approx(expected_values(), rel=1e-5)


@pytest.mark.parametrize(
    ("per_device_parallelism", "together"),
    [(-1, [range(ROWS)]), (2, [(0, 1, 4, 5), (2, 3, 6, 7)])],
    ids=["at once", "each device in turns"],
)
def test_fast_steps_log_too(per_device_parallelism: int, together: list[Sequence[int]]) -> None:
    setup = plan(devices=2, determinism="fast", per_device_parallelism=per_device_parallelism)
    assert drop_step_metrics(first_step(setup)) == pytest.approx(expected_values(*together), rel=1e-5)


def test_the_bits_are_the_same_on_any_number_of_devices() -> None:
    metrics_by_devices = [first_step(plan(devices=devices)) for devices in (1, 4)]
    assert metrics_by_devices[0] == metrics_by_devices[1]
    assert drop_step_metrics(metrics_by_devices[0]) == pytest.approx(expected_values(), rel=1e-5)


def test_a_microbatch_without_weight_has_no_say() -> None:
    def mean_of_learnt(model: Any, batch: Batch, key: jax.Array | None) -> Any:
        log("learnt", jnp.sum(batch.weights * batch.tokens) / jnp.sum(batch.weights))
        return loss(model, batch, key)

    half = BATCH._replace(weights=np.where(np.arange(ROWS)[:, None] < 4, BATCH.weights, 0).astype(np.float32))
    metrics = first_step(plan(loss=mean_of_learnt), half)
    assert metrics["learnt"] == pytest.approx((half.weights * half.tokens).sum() / half.weights.sum(), rel=1e-5)


class TestPrograms:
    def test_where_nobody_listens_a_call_leaves_nothing(self) -> None:
        def plain(x: jax.Array, w: jax.Array) -> jax.Array:
            return jnp.tanh(x @ w)

        def computing(x: jax.Array, w: jax.Array) -> jax.Array:
            y = jnp.tanh(x @ w)
            jnp.sum(y)
            return y

        def logging(x: jax.Array, w: jax.Array) -> jax.Array:
            y = jnp.tanh(x @ w)
            log("sum", jnp.sum(y))
            return y

        def programs(layer: Any) -> list[Executable]:
            def run(x: jax.Array, w: jax.Array) -> jax.Array:
                return jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, w)[0].sum()

            arguments = jnp.ones((2, 2)), jnp.ones((3, 2, 2))
            return [Executable.from_jitted(jax.jit(f), *arguments) for f in (run, jax.grad(run))]

        assert [p.jaxpr() for p in programs(logging)] == [p.jaxpr() for p in programs(computing)]
        # The value itself, which nothing reads, is left out by the compiler.
        assert [p.fingerprint() for p in programs(logging)] == [p.fingerprint() for p in programs(plain)]

    def test_a_loss_that_logs_nothing_is_differentiated_as_it_is(self) -> None:
        model = trace_module(PlainBigrams, jnp.float32)
        rows, key = numbered_batch(0), jax.random.key(0)

        def by_hand(params: Any, batch: Batch, key: jax.Array) -> Any:
            def objective(chosen: Any) -> Any:
                total, weight, metrics = plain_loss(model.merge(chosen), batch, key)
                return total, {"loss": total, "weight": weight, **metrics}

            (_, scalars), grads = jax.value_and_grad(objective, has_aux=True)(params)
            return scalars, grads

        function = loss_and_gradient(model, plain_loss, model.trainable)
        jaxpr, expected_jaxpr = (str(jax.make_jaxpr(f)(model.init(), rows, key)) for f in (function, by_hand))
        assert jaxpr == expected_jaxpr

    def test_a_function_that_jax_knows_from_before_is_logged(self) -> None:
        @jax.jit
        def log_known(x: jax.Array) -> jax.Array:
            log("known", jnp.sum(x))
            return x

        def with_known(model: Any, batch: Batch, key: jax.Array | None) -> Any:
            total, weight, metrics = loss(model, batch, key)
            return total + log_known(jnp.ones(3))[0], weight, metrics

        log_known(jnp.ones(3))
        setup = plan(loss=with_known)
        assert first_step(setup)["known"] == 3
        assert setup.evaluate(setup.init().params, [BATCH])["known"] == 3


def loss_calling(call: Callable[[jax.Array], Any]) -> Callable[..., Any]:
    """A loss that calls `call` with its own value."""

    def function(model: Any, batch: Batch, key: jax.Array | None) -> Any:
        total, weight, metrics = loss(model, batch, key)
        return total + call(total), weight, metrics

    return function


def in_custom_vjp(x: jax.Array) -> jax.Array:
    @jax.custom_vjp
    def double(x: jax.Array) -> jax.Array:
        log("inside", x)
        return 2 * x

    double.defvjp(lambda x: (double(x), None), lambda _, g: (2 * g,))
    return double(x)


def in_a_while_loop(x: jax.Array) -> jax.Array:
    def body(x: jax.Array) -> jax.Array:
        log("inside", x)
        return x + 1

    return jax.lax.stop_gradient(jax.lax.while_loop(lambda x: x < 3, body, x))


def in_shard_map(x: jax.Array) -> jax.Array:
    def body(x: jax.Array) -> jax.Array:
        log("inside", x)
        return x

    mesh = jax.typeof(x).sharding.mesh
    return jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())(x)


def in_vmap(x: jax.Array) -> jax.Array:
    return jnp.sum(jax.vmap(lambda x: (log("inside", x), x)[1])(jnp.stack([x, x])))


def in_one_branch(x: jax.Array) -> jax.Array:
    return jax.lax.cond(x > 0, lambda x: (log("inside", x), x)[1], lambda x: -x, x)


def log_twice(x: jax.Array) -> None:
    log("inside", x)
    log("inside", 2 * x)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (in_custom_vjp, r"'inside' \(test_logged.py:\d+\) cannot be brought out of a function with jax.custom_vjp"),
        (in_a_while_loop, "cannot be brought out of jax.lax.while_loop"),
        (in_shard_map, "cannot be brought out of jax.shard_map"),
        (in_vmap, "is called under jax.vmap"),
        (in_one_branch, "must be logged alike in all branches of jax.lax.cond"),
        (
            lambda x: log_twice(x) or x,
            r"'inside' is the name of two values, at test_logged.py:\d+ and at test_logged.py:\d+",
        ),
        (lambda x: log("first", x) or x, "'first' is the name of two values, at .* and in the metrics that the loss"),
        (lambda x: log("loss", x) or x, "'loss' .* is a name of the step's own"),
        (lambda x: log("", x) or x, "the first argument is a name, not ''"),
        (lambda x: log("a", jnp.stack([x, x])) or x, r"'a' .* has the shape \(2,\); log scalars"),
        (lambda x: log("a", x, reduce="max") or x, "reduce is 'mean' or 'sum', not 'max'"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_cannot_be_logged(function: Any, problem: str) -> None:
    setup = plan(loss=loss_calling(function))
    with pytest.raises(UserError, match=problem):
        setup.step.compile(BATCH)


def test_branches_that_log_alike() -> None:
    def branches(x: jax.Array) -> jax.Array:
        return jax.lax.cond(
            x > 1e6,
            lambda x: (log("branch", 1.0), x)[1],
            lambda x: (log("branch", 2.0), x)[1],
            x,
        )

    assert first_step(plan(loss=loss_calling(branches)))["branch"] == 2


def test_a_run_records_them_for_training_and_evaluation() -> None:
    def right(model: Any, batch: Batch, key: jax.Array | None) -> Any:
        total, weight, metrics = plain_loss(model, batch, key)
        log("group/right", metrics["accuracy"], reduce="sum")
        return total, weight, metrics

    with Trainer(settings(), OPTIMIZER, right) as trainer:
        trainer.add_eval_hook(Numbered())
        trainer.train(trainer.initial_state(model_init=PlainBigrams), trainer.data_loader(Numbered()))
    lines = [json.loads(line) for line in Path("logs/own/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    assert len(steps) == STEPS
    assert all(line["train/group/right"] == line["train/accuracy"] for line in steps)
    assert all(line["eval/group/right"] == line["eval/accuracy"] for line in lines if "eval/loss" in line)


def test_a_value_that_is_not_finite_stops_the_run() -> None:
    def bad(model: Any, batch: Batch, key: jax.Array | None) -> Any:
        log("bad", jnp.log(-jnp.sum(batch.weights)))
        return plain_loss(model, batch, key)

    with (
        Trainer(settings(), OPTIMIZER, bad) as trainer,
        pytest.raises(NonFiniteError, match="step 1: bad is nan; the step was applied"),
    ):
        trainer.train(trainer.initial_state(model_init=PlainBigrams), trainer.data_loader(Numbered()))


def test_a_metric_that_the_loss_returns_by_a_name_of_the_steps_own_is_refused() -> None:
    def loss_with_own_metric(
        model: Any, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        total, weight, metrics = loss(model, batch, key)
        return total, weight, {**metrics, "squares": total}

    with pytest.raises(UserError, match="the loss returns a metric 'squares', a name of the step's own"):
        plan(Stack, loss_with_own_metric).step.compile(BATCH)
