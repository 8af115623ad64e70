"""Models laid out for decoding, beside those that they are made of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lm_trainer.generate.layout import to_decoding_layout
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.linear import Linear
from lm_trainer.nn.lora import attach_lora
from lm_trainer.nn.lora_config import LoraConfig
from lm_trainer.nn.mixer_spec import cache_sizes
from tests.compiling import quick_jit
from tests.models.common import TINY, VOCAB, WITHOUT_OWN_PARTS

TOKENS = np.random.default_rng(0).integers(0, VOCAB, (3, 5))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in WITHOUT_OWN_PARTS else pytest.mark.slow)
        for name in TINY
    ],
)
def test_logits_are_those_of_the_model(family: str) -> None:
    model = built(family)
    if any(cache_sizes(block.mixer) is None for block in model.spec.blocks):
        assert to_decoding_layout(model) is model
    else:
        assert_alike(model)


@pytest.mark.slow
def test_layers_with_heads_of_two_sizes() -> None:
    assert_alike(built("gemma4", num_kv_shared_layers=0))


@pytest.mark.slow
def test_adapters_and_layers_in_a_loop() -> None:
    model = built("llama", scan_layers=True)
    attach_lora(model, LoraConfig(rank=2), {}, rngs=nnx.Rngs(1))
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if "lora" in path:
            param[...] = jnp.cos(jnp.arange(param[...].size)).reshape(param[...].shape)
    assert_alike(model)


def test_a_model_on_several_devices_stays_as_it_is() -> None:
    model = built("gpt2")
    graph, state = nnx.split(model)
    everywhere = jax.NamedSharding(jax.make_mesh((2,), ("data",)), jax.P())
    spread = nnx.merge(graph, jax.device_put(state, everywhere))
    assert to_decoding_layout(spread) is spread


def test_parameters_of_numpy_are_laid_out_as_those_of_jax():
    model = built("gpt2")
    graph, state = nnx.split(model)
    of_numpy = nnx.merge(graph, jax.tree.map(np.asarray, state))
    actual, expected = (jax.tree.leaves(nnx.state(to_decoding_layout(source))) for source in (of_numpy, model))
    assert all(isinstance(leaf, jax.Array) for leaf in actual)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def built(family: str, **changes: object) -> Decoder:
    config = TINY[family].model_copy(update=changes)
    build = lambda: config.build(VOCAB, rngs=nnx.Rngs(0))  # noqa: E731
    state = quick_jit(lambda: nnx.state(build(), nnx.Param))()
    return nnx.merge(nnx.split(nnx.eval_shape(build), nnx.Param)[0], state)


def assert_alike(model: Decoder) -> None:
    fast = to_decoding_layout(model)
    assert not [path for path, module in nnx.iter_modules(fast) if isinstance(module, Linear)]
    assert [path for path, module in nnx.iter_modules(model) if isinstance(module, Linear)]
    for actual, expected in zip(two_steps(fast), two_steps(model), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def two_steps(model: Decoder) -> list[np.ndarray]:
    """Logits after a few tokens of each row, and after one more, which reads the cache."""
    cache, steps = model.init_cache(3, 8), []
    for first, last in ((0, 4), (4, 5)):
        positions = np.broadcast_to(np.arange(first, last), (3, last - first))
        logits, cache = step(model, TOKENS[:, first:last], positions, cache)
        steps.append(np.asarray(logits))
    return steps


@quick_jit
def step(model: Decoder, tokens, positions, cache):
    return model.decode(tokens, positions, cache)
