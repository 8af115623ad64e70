"""Senses against the paper's equations, written out sense by sense, on top of a backbone that is tested elsewhere."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pydantic import ValidationError

from lm_trainer.core.errors import UserError
from lm_trainer.models import BackpackConfig, hf
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.senses import SenseDecoder
from lm_trainer.profile.flops import parameter_count
from tests.compiling import quick_jit
from tests.models.common import SEQ, TINY, VOCAB, change, disturbed, params, positions, tokens

CONFIG: Any = TINY["backpack"]
SEGMENTS = np.array([[0] * 5 + [1] * (SEQ - 5), [0] * SEQ], np.int32)


def layer_norm(x: np.ndarray, norm: dict[str, Any]) -> np.ndarray:
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * norm["scale"] + norm["bias"]


def linear(x: np.ndarray, layer: dict[str, Any]) -> np.ndarray:
    return x @ layer["weight"].reshape(x.shape[-1], -1) + layer["bias"].reshape(-1)


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def brute_force(weights: dict[str, Any], rows: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """Logits from the last hidden states of the backbone, in float64."""
    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights)
    n, d = CONFIG.num_senses, CONFIG.hidden_dim
    sense, table = w["senses"], w["embed"]["tokens"]
    x = table + layer_norm(table, sense["input_norm"])
    x = x + linear(gelu(linear(layer_norm(x, sense["mlp_pre_norm"]), sense["mlp"]["up"])), sense["mlp"]["down"])
    senses = linear(gelu(linear(layer_norm(x, sense["out_pre_norm"]), sense["up"])), sense["down"])
    senses = senses.reshape(VOCAB, n, d)
    q, k = (linear(hidden, w[name]).reshape(*rows.shape, n, d // n) for name in "qk")
    out = np.zeros((*rows.shape, d))
    for b, i in np.ndindex(rows.shape):
        visible = [j for j in range(i + 1) if SEGMENTS[b, j] == SEGMENTS[b, i]]
        for s in range(n):
            scores = np.array([q[b, i, s] @ k[b, j, s] / math.sqrt(d // n) for j in visible])
            weight = np.exp(scores - scores.max())
            for j, a in zip(visible, weight / weight.sum(), strict=True):
                out[b, i] += a * senses[rows[b, j], s] / n
    return out @ table.T


@pytest.mark.slow
def test_the_sum_of_weighted_senses():
    spec, rows = CONFIG.spec(VOCAB), tokens()
    weights = disturbed(params(CONFIG))
    parts = {name: weights[name] for name in ("embed", "blocks", "final_norm")}

    def run(weights: Any, parts: Any) -> tuple[jax.Array, jax.Array]:
        graph = nnx.split(nnx.eval_shape(lambda: SenseDecoder(spec, rngs=nnx.Rngs(0))), nnx.Param)[0]
        plain = replace(spec, senses=None)
        backbone = nnx.split(nnx.eval_shape(lambda: Decoder(plain, rngs=nnx.Rngs(0))), nnx.Param)[0]
        inputs = (jnp.asarray(rows), jnp.asarray(positions()), jnp.asarray(SEGMENTS))
        return nnx.merge(graph, weights)(*inputs), nnx.merge(backbone, parts).hidden(*inputs)

    logits, hidden = quick_jit(run)(weights, parts)
    expected = brute_force(weights, rows, np.asarray(hidden, np.float64))
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(logits, expected, atol=2e-6)


def test_the_default_is_the_small_model_of_the_paper():
    assert round(parameter_count(BackpackConfig().spec(50264)) / 1e6) == 170


def test_senses_divide_the_hidden_dimension():
    with pytest.raises(ValidationError, match="hidden_dim=768 is not a multiple of num_senses=5"):
        BackpackConfig(num_senses=5)


def test_senses_do_not_use_what_cannot_compute_them():
    spec = change(CONFIG, attn_backend="auto").spec(VOCAB)
    assert spec.senses is not None
    assert spec.blocks[0].attention.scores.backend == "auto"
    assert spec.senses.attention.scores.backend == "xla"


def test_there_is_no_hugging_face_format():
    message = "a backpack model has no Hugging Face format: transformers has no such model"
    with pytest.raises(UserError, match=message):
        hf.config_to_hf(CONFIG, vocab_size=VOCAB, eos_id=0, bos_id=None)
    with pytest.raises(UserError, match=message):
        hf.params_to_hf(CONFIG, {})
    with pytest.raises(UserError, match=message):
        hf.config_from_hf({"model_type": "backpack-gpt2", "vocab_size": VOCAB})
    with pytest.raises(UserError, match=r"'x' is not supported; supported: apertus.*gpt2") as unknown:
        hf.config_from_hf({"model_type": "x"})
    assert "backpack" not in str(unknown.value)
