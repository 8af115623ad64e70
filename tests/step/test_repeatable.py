"""The programs that a GPU's compiler is given, so that they repeat their bits; none of this needs a GPU."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import pytest

from lm_trainer.nn import attention_dispatch
from lm_trainer.nn.attention_dispatch import BackendChoice
from lm_trainer.nn.attention_kernel import AttentionMetadata, is_summing_in_fixed_order
from lm_trainer.nn.spec import AttentionSpec
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.setup import build_setup
from lm_trainer.step.dispatch.executable import Executable
from lm_trainer.step.dispatch.repeatable import ask_for_fixed_order, compile_repeatable
from tests.step.test_layerwise import LLAMA, VOCAB, config_of

ROWS, POSITIONS, HEADS, HEAD_SIZE = 2, 64, 2, 64


@pytest.fixture
def two_attentions(monkeypatch: pytest.MonkeyPatch) -> jax.stages.Lowered:
    """The gradient of two layers of attention by cuDNN, lowered for a GPU that is not there."""
    from jax._src.cudnn import fused_attention_stablehlo

    # JAX asks the GPU which cuDNN it has.
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91801)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda *_: True)

    def attention(x: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation="cudnn")

    def loss(x: jax.Array) -> jax.Array:
        return attention(attention(x)).astype(jnp.float32).sum()

    shape = jax.ShapeDtypeStruct((ROWS, POSITIONS, HEADS, HEAD_SIZE), jnp.bfloat16)
    return jax.jit(jax.grad(loss)).trace(shape).lower(lowering_platforms=("cuda",))


def attention_settings(lowered: jax.stages.Lowered) -> list[tuple[str, bool]]:
    """Name of each call of cuDNN's attention, and whether it asks for a fixed order."""
    calls = re.findall(r'custom_call @(__cudnn\$fmha\w+)\(.*?backend_config = "(.*?)", operand', lowered.as_text())
    settings = [(name, json.loads(text.replace("\\22", '"'))) for name, text in calls]
    return [(name, config["cudnn_fmha_backend_config"].get("force_deterministic", False)) for name, config in settings]


def test_every_backward_pass_of_attention_is_asked_for_a_fixed_order(two_attentions: jax.stages.Lowered) -> None:
    before = attention_settings(two_attentions)
    assert [is_fixed for _, is_fixed in before] == [False] * 4
    ask_for_fixed_order(two_attentions)
    # What is compiled is what was changed.
    after = attention_settings(two_attentions)
    assert [name for name, _ in after] == [name for name, _ in before]
    assert {name.endswith("Backward"): is_fixed for name, is_fixed in after} == {False: False, True: True}
    assert sum(is_fixed for _, is_fixed in after) == 2


def test_other_platforms_compile_as_always() -> None:
    lowered = jax.jit(lambda x: x * 2).lower(jnp.ones(3))
    assert compile_repeatable(lowered, "cpu")(jnp.ones(3)).tolist() == [2, 2, 2]


@pytest.mark.parametrize("repeatable", [True, False])
def test_attention_knows_of_sums_in_a_fixed_order(repeatable: bool) -> None:
    traced: list[bool] = []

    def function(x: jax.Array) -> jax.Array:
        traced.append(is_summing_in_fixed_order())
        return x

    Executable.from_jitted(jax.jit(function), jnp.ones(3), repeatable=repeatable)
    assert traced == [repeatable]
    assert not is_summing_in_fixed_order()


@pytest.mark.slow
def test_all_traces_of_a_layer_know_of_sums_in_a_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel decides which residuals a layer saves, so their shapes are traced with the same one."""
    traced: list[bool] = []
    choose = attention_dispatch.choose_backend

    def choose_and_record(spec: AttentionSpec, metadata: AttentionMetadata) -> BackendChoice:
        traced.append(metadata.fixed_order)
        return choose(spec, metadata)

    monkeypatch.setattr(attention_dispatch, "choose_backend", choose_and_record)
    setup = build_setup(config_of(LLAMA), VOCAB, jax.devices()[:1])
    traced.clear()
    setup.step.compile(random_batch(8, 16, VOCAB))
    assert len(traced) > 1
    assert all(traced)
