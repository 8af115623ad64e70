"""Whisper against `transformers`: parameters, config, tensors, logits."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.export.weights import Weights, read_json
from lm_trainer.models import WhisperConfig, hf
from lm_trainer.nn.encoder_decoder import EncoderDecoder
from lm_trainer.nn.loss import token_loss
from lm_trainer.nn.positions import sinusoids
from lm_trainer.profile.flops import flops_per_token, parameter_count
from tests.compiling import quick_jit
from tests.models.common import change, positions, tokens
from tests.models.speech import FRAMES, MELS, SEQ, TINY, VOCAB, features, graphdef, params, rows

HF_FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 24,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 56,
    "num_mel_bins": MELS,
    "max_source_positions": FRAMES // 2,
    "max_target_positions": SEQ,
    "init_std": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
    "begin_suppress_tokens": [7, 2],
    "suppress_tokens": [9],
}
"""Depths, widths and heads that are all different."""


def make(directory: Path, **changes: Any) -> Any:
    """A checkpoint of `transformers` whose norms and biases are not those of a fresh one, and its model."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.WhisperConfig(**{**HF_FIELDS, **changes})
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                x += 0.2 * torch.randn_like(x)
    model.save_pretrained(directory)
    return model


def read_model(directory: Path) -> tuple[WhisperConfig, dict[str, Any]]:
    config, vocab_size = hf.config_from_hf(read_json(directory / "config.json"))
    assert isinstance(config, WhisperConfig)
    assert vocab_size == VOCAB
    return change(config, scan_layers=False), hf.params_from_hf(config, vocab_size, Weights(directory))


@pytest.mark.parametrize(
    "changes",
    [{}, {"activation_function": "relu", "encoder_layers": 1, "decoder_layers": 4}],
    ids=["plain", "changed"],
)
def test_logits_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    reference = make(tmp_path, **changes)
    config, weights = read_model(tmp_path)
    batch = rows()
    assert batch.features is not None
    with torch.no_grad():
        torch_features = torch.from_numpy(np.asarray(batch.features).transpose(0, 2, 1).copy())
        expected = reference(
            torch_features, decoder_input_ids=torch.from_numpy(np.asarray(batch.tokens)).long()
        ).logits.numpy()
    actual = logits(config, weights, batch)
    assert np.abs(expected).max() > 1
    assert np.abs(actual - expected).max() <= 1e-4


def logits(config: WhisperConfig, weights: Any, batch: Batch) -> np.ndarray:
    graph = graphdef(config)

    def forward(p: Any, b: Batch) -> jax.Array:
        model = nnx.merge(graph, p)
        return model.logits(model.batch_hidden_and_stats(b)[0])

    return np.asarray(quick_jit(forward)(weights, batch))


def test_tensors_and_config_come_back_exactly(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = make(tmp_path)
    config, weights = read_model(tmp_path)
    state = {name: x.numpy() for name, x in reference.state_dict().items() if name != "proj_out.weight"}
    written = hf.params_to_hf(config, weights)
    assert written.keys() == state.keys()
    for name, x in written.items():
        np.testing.assert_array_equal(x, state[name], err_msg=name)
    hf_config = hf.config_to_hf(config, vocab_size=VOCAB, eos_id=2, bos_id=1)
    loaded, expected = transformers.WhisperConfig(**hf_config).to_dict(), reference.config.to_dict()
    skipped = ("architectures", "dtype", "torch_dtype", "_name_or_path", "transformers_version")
    assert {k: v for k, v in loaded.items() if k not in skipped} == {
        k: v for k, v in expected.items() if k not in skipped
    }
    assert change(hf.config_from_hf(hf_config)[0], scan_layers=False) == config


def test_parameters_are_as_many_as_in_transformers(tmp_path: Path) -> None:
    reference = make(tmp_path)
    config, weights = read_model(tmp_path)
    counted = sum(leaf.size for leaf in jax.tree.leaves(weights))
    assert parameter_count(config.spec(VOCAB)) == reference.num_parameters() == counted


def test_the_defaults_are_the_tiny_model_of_the_paper() -> None:
    """39M in table 1 of Radford et al. 2022: 37.76M as `transformers` counts the published multilingual checkpoint."""
    assert parameter_count(WhisperConfig().spec(51865)) == 37_760_640


def test_positions_of_the_encoder_are_those_of_transformers() -> None:
    reference = pytest.importorskip("transformers.models.whisper.modeling_whisper")
    np.testing.assert_allclose(sinusoids(300, 64), reference.sinusoids(300, 64).numpy(), atol=1e-4)


def test_flops_are_those_of_the_program() -> None:
    """By XLA's own count, before it optimises anything."""
    wide = change(
        TINY,
        hidden_dim=512,
        intermediate_dim=1024,
        encoder_intermediate_dim=768,
        num_mels=80,
        num_frames=200,
        seq_len=64,
    )
    batch = Batch(*(np.zeros((2, 64), np.int32),) * 5, features=np.zeros((2, 200, 80), np.float32))
    graph = graphdef(wide)
    forward = jax.jit(lambda p, b: nnx.merge(graph, p).logits(nnx.merge(graph, p).batch_hidden_and_stats(b)[0]))
    shapes = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(wide.build(VOCAB, rngs=nnx.Rngs(0)), nnx.Param)))
    cost = forward.lower(shapes, batch).cost_analysis()
    assert cost is not None
    assert flops_per_token(wide.spec(VOCAB), 64).forward * 128 == pytest.approx(cost["flops"], rel=0.03)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"scan_layers": True, "gradient_checkpointing": "dots"}, id="scan", marks=pytest.mark.slow),
        pytest.param({"gradient_checkpointing": True}, id="remat"),
    ],
)
def test_execution_changes_no_number(fields: dict[str, Any]) -> None:
    actual, expected = loss_and_grads(change(TINY, **fields)), plain()
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), actual[1], expected[1])
    without = [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(actual[1])
        if not np.any(np.asarray(leaf))
    ]
    assert not without, "parameters without a gradient"


@functools.cache
def plain() -> Any:
    """Loss and gradients, unrolled and without rematerialisation."""
    return loss_and_grads(TINY)


def loss_and_grads(config: WhisperConfig) -> Any:
    graph, batch = graphdef(config), rows()
    loss = quick_jit(jax.value_and_grad(lambda p: token_loss(nnx.merge(graph, p), batch)[0]))
    return loss(params())


@pytest.mark.slow
def test_decoding_with_a_cache_equals_the_full_forward_pass() -> None:
    batch, graph = rows(), graphdef(TINY)
    expected = logits(TINY, params(), batch)
    cache = quick_jit(lambda p: nnx.merge(graph, p).encode(jnp.asarray(batch.features), SEQ))(params())
    decode = quick_jit(lambda p, cache, t, positions_BT: nnx.merge(graph, p).decode(t, positions_BT, cache))
    parts = []
    for part in np.split(np.arange(SEQ), 2):
        step, cache = decode(params(), cache, batch.tokens[:, part], positions(2, SEQ)[:, part])
        parts.append(step)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, atol=1e-5)


def test_rows_that_cannot_be_heard_are_refused() -> None:
    model = nnx.merge(graphdef(TINY), params())
    assert isinstance(model, EncoderDecoder)
    with pytest.raises(UserError, match="its rows need the features of audio"):
        token_loss(model, rows()._replace(features=None))
    with pytest.raises(UserError, match="hears 12 frames of 5 features, but the rows have 8 of 5"):
        token_loss(model, rows()._replace(features=features()[:, :8]))
    with pytest.raises(UserError, match="writes what it hears"):
        model(jnp.asarray(tokens(2, 4)), jnp.asarray(positions(2, 4)), jnp.zeros((2, 4), jnp.int32))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoder_heads": 5}, "not a multiple of encoder_heads=5"),
        ({"num_frames": 7}, "multiple of 2"),
        ({"attn_backend": "ring"}, "ring cannot attend to an encoder"),
    ],
)
def test_settings_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        change(TINY, **fields)
