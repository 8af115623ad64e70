"""A gradient computed layer by layer: the numbers of the whole model's, and the same bits on any mesh."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.models import LlamaConfig
from lm_trainer.nn.spec import DecoderSpec
from lm_trainer.plan.memory import StepMemory
from lm_trainer.run.build.model import loss_function
from lm_trainer.run.build.setup import build_setup
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.step.staged.hutchinson import rademacher_row
from lm_trainer.step.staged.read_dtypes import find_read_dtypes, find_value_dtypes
from lm_trainer.step.staged.stage_functions import StageFunctions
from lm_trainer.step.state.train_state import to_host
from tests.step.random_runs import RandomRun, batches, difference, draw_layerwise

VOCAB = 61
LLAMA: dict[str, Any] = {
    "type": "llama",
    "seq_len": 16,
    "hidden_dim": 32,
    "intermediate_dim": 48,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
}
GEMMA2 = {**LLAMA, "type": "gemma2", "head_dim": 8, "sliding_window": 5}
GEMMA4 = {
    **GEMMA2,
    "type": "gemma4",
    # The family does not divide logits by the root of the size of a head, so larger heads amplify rounding.
    "head_dim": 4,
    "global_head_dim": 8,
    "num_global_kv_heads": 1,
    "sliding_window_pattern": 3,
}
GEMMA4_SMALL = {
    **GEMMA4,
    "num_layers": 4,
    "sliding_window_pattern": 2,
    "num_kv_shared_layers": 2,
    "layer_embedding_dim": 6,
    "use_double_wide_mlp": True,
}
"""Layers with token embeddings of their own, the last of which use the keys of earlier ones."""
PREFIXED = {**LLAMA, "prefix": 1}
"""Stacks and compiles the first layer by itself."""
GPT2 = {"type": "gpt2", "seq_len": 16, "hidden_dim": 32, "num_layers": 2, "num_heads": 4}
BACKPACK = {**GPT2, "type": "backpack", "num_senses": 2}
MIXTRAL = {**LLAMA, "type": "mixtral", "n_routed_experts": 4, "num_experts_per_tok": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embed_pdrop": 0.0, "attn_pdrop": 0.0}


class PrefixedLlama(LlamaConfig):
    def spec(self, vocab_size: int) -> DecoderSpec:
        return dataclasses.replace(super().spec(vocab_size), prefix=1)


def config_of(model: dict[str, Any], optimizer: str = "adam", **trainer: Any) -> RunConfig:
    settings = {"train_batch_size": 8, "elastic_shards": 8, "num_train_steps": 4, "gather": "layer", **trainer}
    fields = {name: value for name, value in model.items() if name != "prefix"}
    config = RunConfig.model_validate({"model": fields, "trainer": settings, "optimizer": {"type": optimizer}})
    return config.model_copy(update={"model": PrefixedLlama(**fields)}) if "prefix" in model else config


def batch_of(config: RunConfig) -> Batch:
    run = RandomRun(trainer={}, optimizer={}, devices=1, mesh={}, model=config.model.model_dump(), vocab_size=VOCAB)
    return batches(run, config.trainer)[0]


def gradient(config: RunConfig, devices: int = 1) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    setup, batch = build_setup(config, VOCAB, jax.devices()[:devices]), batch_of(config)
    setup.step.compile(batch)
    sums = setup.step.gradient(setup.init(), setup.step.put(batch))
    return {name: float(x) for name, x in sums.scalars.items()}, to_host(sums.tree)


def plain_gradient(config: RunConfig) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """The gradient of the whole batch by one call of JAX."""
    setup, loss, batch = build_setup(config, VOCAB, jax.devices()[:1]), loss_function(config), batch_of(config)

    def objective(params: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        total, weight, metrics = loss(setup.model.merge(params), batch, None)
        return total, {"loss": total, "weight": weight, **metrics}

    grads, scalars = jax.jit(jax.grad(objective, has_aux=True))(setup.init().params)
    return {name: float(x) for name, x in scalars.items()}, to_host(grads)


def assert_close(actual: Any, expected: Any) -> None:
    assert actual[0] == pytest.approx(expected[0], rel=1e-5)
    assert actual[1].keys() == expected[1].keys()
    # The gradient of the biases of keys is zero but for rounding, which is measured by the other gradients.
    largest = max(np.abs(x).max() for x in expected[1].values())
    for name, x in expected[1].items():
        np.testing.assert_allclose(actual[1][name], x, rtol=1e-3, atol=1e-6 * largest, err_msg=name)


@pytest.mark.parametrize(
    "model",
    [
        LLAMA,
        # Of a tied head and learned positions the test of dropout tells as well.
        pytest.param({**GPT2, **NO_DROPOUT}, marks=pytest.mark.exhaustive),
        pytest.param(GEMMA2, marks=pytest.mark.slow),
        pytest.param({**BACKPACK, **NO_DROPOUT}, marks=pytest.mark.slow),
        pytest.param(MIXTRAL, marks=pytest.mark.slow),
    ],
    ids=lambda model: model["type"],
)
def test_the_gradient_is_that_of_the_whole_model(model: dict[str, Any]) -> None:
    """Untied and tied heads, layers of two kinds, senses that read the table again, experts with their penalty."""
    # One microbatch: the statistics of routers are of microbatches.
    config = config_of(model, per_device_parallelism=8)
    assert_close(gradient(config), plain_gradient(config))


@pytest.mark.slow
@pytest.mark.parametrize("model", [GPT2, pytest.param(BACKPACK, marks=pytest.mark.slow)], ids=lambda m: m["type"])
def test_dropout_draws_what_it_draws_for_the_whole_model(model: dict[str, Any]) -> None:
    assert_close(gradient(config_of(model)), gradient(config_of(model, gather="model")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.optimised if n in (1, 7) else ()) for n in (1, 7, 6, 11, 12, 17)]
)
def test_bits_are_equal_on_other_meshes(number: int) -> None:
    run = draw_layerwise(number)
    mismatch = difference(run)
    assert mismatch is None, f"{run}: {mismatch}"


@pytest.mark.slow
@pytest.mark.parametrize("model", [GEMMA4, GEMMA4_SMALL], ids=["heads of other sizes", "values between layers"])
def test_bits_of_unlike_layers_are_equal_on_several_devices(model: dict[str, Any]) -> None:
    config = config_of(model)
    scalars, grads = gradient(config, 8)
    one_device = gradient(config)
    assert scalars == one_device[0]
    jax.tree.map(np.testing.assert_array_equal, grads, one_device[1])
    assert_close(one_device, gradient(config_of(model, gather="model")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "axes"),
    [
        # Each is in a pair below.
        pytest.param(GPT2, {"context": 2}, marks=pytest.mark.exhaustive),
        pytest.param(MIXTRAL, {"expert": 2}, marks=pytest.mark.exhaustive),
        (MIXTRAL, {"expert": 2, "context": 2}),
        ({**LLAMA, "attn_backend": "ring"}, {"context": 4}),
        (GEMMA4_SMALL, {"context": 2}),
        (BACKPACK, {"context": 2, "model": 2}),
    ],
    ids=lambda settings: settings.get("type", "-".join(settings)),
)
def test_devices_share_the_rows_of_a_microbatch(model: dict[str, Any], axes: dict[str, int]) -> None:
    """With the dropout of each device, statistics of routers, and keys of the whole row."""
    devices = math.prod(axes.values())
    trainer: dict[str, Any] = {f"{axis}_axis_size": size for axis, size in axes.items()} | {"per_device_parallelism": 2}
    config = config_of(model, **trainer)
    layerwise = gradient(config, devices)
    assert_close(layerwise, gradient(config_of(model, **trainer, gather="model"), devices))
    scalars, grads = gradient(config, 2 * devices)
    assert scalars == layerwise[0]
    jax.tree.map(np.testing.assert_array_equal, grads, layerwise[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "axes"),
    [({**GPT2, "num_layers": 1}, ["context"]), (MIXTRAL, ["expert", "context"])],
    ids=["gpt2", "mixtral"],
)
def test_held_out_losses_of_devices_that_share_rows(model: dict[str, Any], axes: list[str]) -> None:
    def means(**trainer: Any) -> dict[str, float]:
        sizes: dict[str, Any] = {f"{axis}_axis_size": 2 for axis in axes}
        config = config_of(model, per_device_parallelism=2, **sizes, **trainer)
        setup = build_setup(config, VOCAB, jax.devices()[: 2 ** len(axes)])
        return setup.evaluate(setup.init().params, [batch_of(config)])

    assert means() == pytest.approx(means(gather="model"), rel=1e-5)


@pytest.mark.slow
def test_held_out_losses_are_those_of_the_whole_model_and_equal_on_two_devices() -> None:
    def means(devices: int, **trainer: Any) -> dict[str, float]:
        config = config_of(LLAMA, **trainer)
        setup = build_setup(config, VOCAB, jax.devices()[:devices])
        return setup.evaluate(setup.init().params, [batch_of(config)])

    one = means(1)
    assert means(2, microbatches_per_gather=1) == one
    assert one == pytest.approx(means(1, gather="model"), rel=1e-5)


def estimate(config: RunConfig) -> dict[str, np.ndarray]:
    """The optimizer's average of curvature after one step."""
    setup, batch = build_setup(config, VOCAB, jax.devices()[:1]), batch_of(config)
    setup.step.compile(batch)
    arrays = jax.tree_util.tree_leaves_with_path(setup.take_step(setup.init(), batch)[0].opt_state)
    by_name = {jax.tree_util.keystr(path): np.asarray(x) for path, x in arrays}
    return {name: x for name, x in by_name.items() if "curvature" in name}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sophia-g", "sophia-h"])
@pytest.mark.parametrize(
    "model",
    [
        BACKPACK,
        {**MIXTRAL, "tie_word_embeddings": True},
        # Its positions and dropout are those of backpack, and its head that of mixtral.
        pytest.param(GPT2, marks=pytest.mark.exhaustive),
    ],
    ids=lambda model: model["type"],
)
def test_curvature_is_that_of_the_whole_model(optimizer: str, model: dict[str, Any]) -> None:
    """The signs and targets that are drawn are the same: with others nothing would agree."""
    config = config_of(model, optimizer, train_batch_size=2, elastic_shards=2)
    layerwise, expected = (
        estimate(config),
        estimate(config_of(model, optimizer, train_batch_size=2, elastic_shards=2, gather="model")),
    )
    assert max(np.abs(x).max() for x in expected.values()) > 0
    assert_close(({}, layerwise), ({}, expected))


@pytest.mark.slow
def test_a_prefix_changes_no_bit() -> None:
    """The layers of a Llama, with the first one by itself, and without a prefix."""
    scalars, grads = gradient(config_of({**LLAMA, "num_layers": 4}))
    for devices in (1, 2):
        other_scalars, other_grads = gradient(config_of({**PREFIXED, "num_layers": 4}), devices)
        assert other_scalars == scalars
        for name, x in grads.items():
            parts = [other_grads[name]]
            if name.startswith("blocks.0."):
                parts.append(other_grads[name.replace("blocks.0.", "blocks.1.")])
            np.testing.assert_array_equal(np.concatenate(parts), x, err_msg=name)


@pytest.mark.parametrize("layers", [range(7), range(1, 5, 2), range(3, 9), range(6, 20, 4)])
def test_the_row_of_a_layer(layers: range) -> None:
    stage = StageFunctions("layer", {}, layers=layers)
    assert [int(stage.row_of(jnp.int32(number))) for number in layers] == [*range(len(layers))]


def test_the_signs_of_a_layer_are_those_that_are_drawn_for_all() -> None:
    key, shape = jax.random.key(7), (5, 3, 7)
    rows = [rademacher_row(key, shape, jnp.int32(row), jnp.bfloat16) for row in range(5)]
    np.testing.assert_array_equal(np.stack(rows), np.asarray(jax.random.rademacher(key, shape, jnp.bfloat16)))


@pytest.mark.slow
def test_adapters_alone_have_gradients() -> None:
    plain = config_of(LLAMA).model_dump() | {
        "adapter": {"type": "lora", "rank": 2},
        "initialize_from_hf": "some/model",
    }
    config = RunConfig.model_validate(plain)
    elastic = config.model_copy(update={"trainer": config.trainer.model_copy(update={"gather": "model"})})
    layerwise = gradient(config)
    assert all("lora" in name for name in layerwise[1])
    assert_close(layerwise, gradient(elastic))


@pytest.mark.slow
def test_more_layers_take_no_more_memory_but_for_state_and_streams() -> None:
    def beyond_state(layers: int) -> int:
        memory = StepMemory(config_of({**LLAMA, "num_layers": layers}), VOCAB, jax.devices()[:1], "gpu")
        at_rest = ("state", "gradients", "new state")
        return max(
            sum(size for name, size in phase.parts.items() if name not in at_rest)
            for phase in memory.plan().phases
            if phase.name == "layer 0 gradient"
        )

    # Eight microbatches of a device, each a row of 16 positions in float32, enter each of the layers.
    # Beside them there are the numbers of the layers.
    assert beyond_state(6) - beyond_state(3) == pytest.approx(3 * 8 * 16 * 32 * 4, abs=100)


def test_a_parameter_that_is_only_cast_is_gathered_in_the_narrower_dtype() -> None:
    def function(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        product = x @ params["only cast"].astype(jnp.bfloat16)
        cast_and_read = params["cast and read"].astype(jnp.bfloat16).sum() + params["cast and read"].sum()
        return product.sum() + cast_and_read + params["read"].sum() + params["widened"].astype(jnp.float32).sum()

    wide, narrow = jax.ShapeDtypeStruct((2, 2), jnp.float32), jax.ShapeDtypeStruct((2, 2), jnp.bfloat16)
    params = dict.fromkeys(("read", "only cast", "cast and read", "not read"), wide) | {"widened": narrow}
    dtypes = find_read_dtypes(function, params, narrow)
    assert dtypes == {
        "cast and read": jnp.float32,
        "only cast": jnp.bfloat16,
        "read": jnp.float32,
        "widened": jnp.bfloat16,
    }


def test_a_table_is_gathered_in_the_dtype_of_its_rows_and_not_for_its_gradient() -> None:
    table, ids = {"table": jax.ShapeDtypeStruct((10, 2), jnp.float32)}, jax.ShapeDtypeStruct((3,), jnp.int32)

    def look_up(params: dict[str, jax.Array], ids: jax.Array, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
        return jnp.take(params["table"], ids, axis=0, mode="fill").astype(dtype)

    def gradient(params: dict[str, jax.Array], ids: jax.Array) -> dict[str, jax.Array]:
        rows, vjp = jax.vjp(lambda params: look_up(params, ids), params)
        return vjp(jnp.ones_like(rows))[0]

    def squared(params: dict[str, jax.Array], ids: jax.Array) -> jax.Array:
        return look_up(params, ids, jnp.float32) ** 2

    def blockwise(params: dict[str, jax.Array], ids: jax.Array) -> jax.Array:
        def add(total: jax.Array, block: jax.Array) -> tuple[jax.Array, None]:
            return total + params["table"].astype(jnp.bfloat16)[block].sum(), None

        return jax.lax.scan(add, jnp.bfloat16(0), ids)[0]

    assert find_value_dtypes(look_up, table, ids) == {"table": jnp.bfloat16}
    assert find_value_dtypes(gradient, table, ids) == {}
    assert find_value_dtypes(squared, table, ids) == {"table": jnp.float32}
    assert find_value_dtypes(blockwise, table, ids) == {"table": jnp.bfloat16}


@pytest.mark.parametrize(
    ("optimizer", "trainer", "message"),
    [
        ("adam", {"pipeline_axis_size": 2, "per_device_parallelism": 2}, "pipeline_axis_size would save no memory"),
    ],
)
def test_what_it_cannot_do_is_refused(optimizer: str, trainer: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_setup(config_of(GPT2, optimizer, **trainer), VOCAB, jax.devices()[:2])


def test_microbatches_per_gather_has_no_effect_on_fast_steps() -> None:
    with pytest.raises(ValueError, match="microbatches_per_gather has no effect with determinism: fast"):
        config_of(LLAMA, determinism="fast", microbatches_per_gather=2)
