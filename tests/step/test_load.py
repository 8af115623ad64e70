"""Parameters that follow from the load of experts over the global batch, in steps on one and several devices."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from lm_trainer.checkpoint.store import Restored
from lm_trainer.core.batch import Batch
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.setup import TrainingSetup, build_setup
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.weights.saved_state import PARAMS, abstract_checkpoint, arrays_to_save, restore_state
from lm_trainer.step.loss.gradient import Sums
from lm_trainer.step.state.train_state import to_host

VOCAB, ROWS, SEQ, E, K = 61, 8, 16, 6, 2
SIZES = {"seq_len": SEQ, "hidden_dim": 16, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1, "intermediate_dim": 24,
         "n_routed_experts": E, "num_experts_per_tok": K, "gradient_checkpointing": False}  # fmt: skip
BIASED = {"type": "glm4_moe", **SIZES, "head_dim": 8, "moe_intermediate_dim": 12, "selection_bias_rate": 0.01,
          "lbl_coef": 0.1, "lbl_over": "row", "initializer_range": 0.3}  # fmt: skip
BALANCED = {"type": "olmoe", **SIZES, "lbl_coef": 0.1, "lbl_over": "batch", "initializer_range": 0.3}
BOTH = {**BALANCED, "type": "qwen2_moe", "moe_intermediate_dim": 12, "shared_intermediate_dim": 20,
        "selection_bias_rate": 0.01}  # fmt: skip


def setup(model: dict[str, Any], devices: int = 1, optimizer: Any = None, **trainer: Any) -> TrainingSetup:
    trainer = {"train_batch_size": ROWS, "elastic_shards": ROWS, **trainer}
    optimizer = {"type": "adam", "learning_rate": 1e-2, "warmup": 0, **(optimizer or {})}
    config = {"model": model, "data": {"tokenizer": "bytes"}, "trainer": trainer, "optimizer": optimizer}
    return build_setup(RunConfig.model_validate(config), VOCAB, jax.devices()[:devices])


@cache
def packed() -> Batch:
    """Rows with padding and weights, of which the load does not depend on the weights."""
    tokens, targets, weights, positions, segments = (
        np.array(x) for x in jax.tree.leaves(random_batch(ROWS, SEQ, VOCAB))
    )
    weights[1], weights[3, 9:], segments[3, 9:] = 0.5, 0.0, -1
    return Batch(tokens, targets, weights, positions, segments)


def gradient(planned: TrainingSetup, batch: Batch | None = None) -> Sums:
    batch = batch or packed()
    planned.step.compile(batch)
    rng = np.random.default_rng(0)
    values = {n: rng.normal(0.0, 0.3, x.shape).astype(x.dtype) for n, x in sorted(planned.model.shapes.items())}
    values |= {n: np.abs(x) for n, x in values.items() if n.endswith(".load")}
    sums = planned.step.gradient(planned.from_weights(values), planned.step.put(batch))
    return Sums({n: x.item() for n, x in sums.scalars.items()}, to_host(sums.tree))  # pyright: ignore[reportArgumentType]


def after_steps(planned: TrainingSetup, steps: int = 3) -> dict[str, bytes]:
    """The bits of the state after some steps, of a held-out loss and of the metrics of the last step."""
    planned.step.compile(packed())
    state, metrics = planned.init(), {}
    for _ in range(steps):
        state, metrics = planned.step(state, planned.step.put(packed()), 1e-2)
    held_out = planned.evaluate({**state.frozen, **state.params}, [packed()])["loss"]
    arrays = {
        **to_host(state.params),
        **{n: np.asarray(x) for n, x in metrics.items()},
        "held_out": np.float64(held_out),
    }
    return {name: x.tobytes() for name, x in arrays.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "devices", "trainer"),
    [
        (BOTH, 2, {}),
        (BOTH, 4, {"gather": "layer"}),
        (BIASED, 8, {"mp": "p=f32,c=bfloat16"}),
        pytest.param(BALANCED, 8, {"gather": "layer"}, marks=pytest.mark.optimised),
        (BIASED, 3, {}),
    ],
    ids=["both-2", "both-4-layers", "biased-8-bf16", "balanced-8-layers", "biased-3"],
)
def test_bits_do_not_depend_on_the_number_of_devices(model: dict[str, Any], devices: int, trainer: Any) -> None:
    alone = after_steps(setup(model, **trainer))
    assert any(name.endswith((".load", ".selection_bias")) for name in alone)
    assert after_steps(setup(model, devices, **trainer)) == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        {"type": "muon"},
        {"type": "schedule_free"},
        {"type": "adam", "clip_update_norm": {"rolling_interval_length": 2}},
        {"type": "sophia-h"},
    ],
    ids=["muon", "schedule_free", "clipped_adam", "sophia"],
)
def test_optimizers_do_not_see_loads(optimizer: dict[str, Any]) -> None:
    """Rules over weights, with weights of their own to evaluate, over several parameters and with a curvature."""
    planned = setup(BOTH, optimizer=optimizer)
    alone = after_steps(planned)
    assert after_steps(setup(BOTH, 2, optimizer=optimizer)) == alone
    state = jax.eval_shape(planned.tx.init, {n: planned.model.shapes[n] for n in planned.model.trainable})
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    assert not [name for name in names if ".load" in name or "selection_bias" in name]
    planned.weights_to_evaluate(planned.init())


def test_the_update_follows_from_the_load_of_the_whole_batch() -> None:
    planned = setup(BOTH)
    sums = gradient(planned)
    state = planned.init()
    before = to_host(state.params)
    placed = planned.step.put(packed())
    loads = planned.step.gradient(state, placed).tree
    loads = {name: np.asarray(x, np.float64) for name, x in loads.items() if name in planned.model.loads}
    valid = int((packed().segments >= 0).sum())
    for load in loads.values():
        np.testing.assert_array_equal(load.sum(-1), np.full(load.shape[0], valid * K))
        np.testing.assert_array_equal(load, np.round(load))
    state, metrics = planned.step(state, placed, 1e-2)
    after = to_host(state.params)
    overload, unused = [], []
    for name, load in loads.items():
        mean = load.mean(-1, keepdims=True)
        if name.endswith(".load"):
            np.testing.assert_allclose(after[name], load / mean, rtol=1e-6)
            overload += list((load / mean).max(-1))
            unused += list((load == 0).sum(-1))
        else:
            np.testing.assert_allclose(after[name], before[name] + 0.01 * np.sign(mean - load), rtol=1e-6)
    assert float(metrics["router_batch_overload"]) == pytest.approx(np.mean(overload))
    assert float(metrics["router_unused_experts"]) == pytest.approx(np.mean(unused))
    # The norm is of the gradient alone, without the counts.
    grads = {n: x for n, x in sums.tree.items() if n not in loads}
    assert grads.keys() == planned.model.optimizer_params().keys()


def test_norms_leave_out_the_load() -> None:
    planned = setup(BOTH)
    planned.step.compile(packed())
    state = planned.init()
    placed = planned.step.put(packed())
    sums = planned.step.gradient(state, placed)
    weight = float(sums.scalars["weight"])
    squares = [
        np.sum(np.square(x, dtype=np.float64)) for n, x in to_host(sums.tree).items() if n not in planned.model.loads
    ]
    _, metrics = planned.step(state, placed, 1e-2)
    assert float(metrics["grad_norm"]) == pytest.approx(np.sqrt(sum(squares)) / weight, rel=1e-5)


@pytest.mark.slow
def test_a_step_that_is_not_finite_changes_no_load() -> None:
    planned = setup(BOTH)
    planned.step.compile(packed())
    state = planned.init()
    state.params["embed.tokens"] = state.params["embed.tokens"] * np.float32("nan")
    before = {n: x for n, x in to_host(state.params).items() if n in planned.model.loads}
    state, _ = planned.step(state, planned.step.put(packed()), 1e-2)
    for name, x in before.items():
        np.testing.assert_array_equal(to_host(state.params)[name], x)


def relative_difference(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max() / np.abs(one).max())


def router_gradients(model: dict[str, Any], shards: int) -> dict[str, np.ndarray]:
    # A penalty counts by the weights of its microbatch, so all tokens get the same weight.
    equal = packed()._replace(weights=(packed().segments >= 0).astype(np.float32))
    tree = gradient(setup(model, elastic_shards=shards, per_device_parallelism=ROWS // shards), equal).tree
    return {name: np.asarray(x) for name, x in tree.items() if name.endswith((".router", ".load"))}


@pytest.mark.slow
@pytest.mark.parametrize(("over", "same"), [("batch", True), ("row", True), ("microbatch", False)])
def test_only_the_loss_over_microbatches_depends_on_their_number(over: str, same: bool) -> None:
    model = {**BALANCED, "lbl_over": over, "lbl_coef": 1.0}
    whole, parts = router_gradients(model, 1), router_gradients(model, ROWS)
    for name, x in whole.items():
        if name.endswith(".load"):
            np.testing.assert_array_equal(parts[name], x)
        else:
            assert (relative_difference(x, parts[name]) < 1e-4) == same, name


@pytest.mark.slow
def test_one_program_for_the_whole_mesh_computes_the_same() -> None:
    """`determinism: fast`, up to rounding."""
    results = []
    for trainer in ({}, {"determinism": "fast"}):
        planned = setup(BOTH, 2, **trainer)
        planned.step.compile(packed())
        state, metrics = planned.step(planned.init(), planned.step.put(packed()), 1e-2)
        results.append((to_host(state.params), {n: float(x) for n, x in metrics.items()}))
    (params, metrics), (fast_params, fast_metrics) = results
    for name in setup(BOTH).model.loads:
        np.testing.assert_allclose(fast_params[name], params[name], rtol=1e-6)
    # Other metrics of routers are of microbatches.
    for name in ("loss", "grad_norm", "router_batch_overload", "router_unused_experts"):
        assert fast_metrics[name] == pytest.approx(metrics[name], rel=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"context": 2}, {"expert": 2, "context": 2}], ids=str)
def test_devices_that_share_a_microbatch_count_together(sizes: dict[str, int]) -> None:
    axes = {f"{axis}_axis_size": size for axis, size in sizes.items()}
    trainer = {"elastic_shards": 2, "per_device_parallelism": ROWS // 2}
    devices = int(np.prod(list(sizes.values())))
    for model in (BOTH, {**BIASED, "expert_kernel": "grouped"}):
        expected, actual = gradient(setup(model, **trainer)), gradient(setup(model, devices, **trainer, **axes))
        assert actual.scalars == pytest.approx(expected.scalars, rel=1e-5)
        for name, x in expected.tree.items():
            scale = float(np.abs(x).max())
            np.testing.assert_allclose(actual.tree[name], x, atol=1e-5 * (scale + 1e-2), err_msg=name)


@pytest.mark.slow
def test_loads_stay_float32_where_parameters_do_not() -> None:
    planned = setup(BOTH, mp="p=bfloat16,c=bfloat16")
    dtypes = {name: planned.model.shapes[name].dtype for name in planned.model.loads}
    assert set(map(str, dtypes.values())) == {"float32"}
    after_steps(planned, 1)


@pytest.mark.slow
def test_a_checkpoint_has_the_loads() -> None:
    """A state that is restored from the arrays of a checkpoint, on other devices, continues with the same bits."""
    planned, other = setup(BOTH), setup(BOTH, 2)
    for one in (planned, other):
        one.step.compile(packed())
    state = planned.init()
    for _ in range(2):
        state, _ = planned.step(state, planned.step.put(packed()), 1e-2)
    shapes = abstract_checkpoint(other)
    saved = {n: jax.device_put(np.asarray(x), shapes[n].sharding) for n, x in arrays_to_save(state, planned).items()}
    assert {PARAMS + name for name in planned.model.loads} <= saved.keys()
    restored = restore_state(Restored(2, saved, {}), other, other.init)
    state, _ = planned.step(state, planned.step.put(packed()), 1e-2)
    continued, _ = other.step(restored, other.step.put(packed()), 1e-2)
    expected, actual = to_host(state.params), to_host(continued.params)
    assert {n: x.tobytes() for n, x in actual.items()} == {n: x.tobytes() for n, x in expected.items()}
