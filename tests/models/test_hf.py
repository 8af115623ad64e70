"""Against transformers on torch, through files."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from lm_trainer.core.errors import UserError
from lm_trainer.models import DecoderConfig, Gpt2Config, hf
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.spec import DecoderSpec
from lm_trainer.profile.flops import parameter_count
from tests.compiling import quick_jit

TINY = {"vocab_size": 67, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "initializer_range": 0.2}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "inverse layer": {"scale_attn_by_inverse_layer_idx": True},
    "upcast": {"reorder_and_upcast_attn": True},
    "relu": {"activation_function": "relu"},
    "exact gelu": {"activation_function": "gelu"},
    "silu": {"activation_function": "silu"},
    "narrow": {"n_inner": 64},
    "epsilon": {"layer_norm_epsilon": 0.05},
}


def read(directory: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return config, load_file(directory / "model.safetensors")


@functools.cache
def _run(spec: DecoderSpec) -> Any:
    graph = nnx.split(nnx.eval_shape(lambda: Decoder(spec, rngs=nnx.Rngs(0))), nnx.Param)[0]
    return quick_jit(lambda p, *args: nnx.merge(graph, p)(*args))


def our_logits(config: DecoderConfig, vocab_size: int, tensors: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    params = hf.params_from_hf(config, vocab_size, tensors)
    positions = np.tile(np.arange(ids.shape[1], dtype=np.int32), (len(ids), 1))
    return np.asarray(_run(config.spec(vocab_size))(params, ids.astype(np.int32), positions, np.zeros_like(positions)))


@pytest.fixture(scope="module")
def tiny(make_hf_model) -> Path:
    return make_hf_model("GPT2", **TINY)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_round_trip(make_hf_model, name):
    directory = make_hf_model("GPT2", **{**TINY, **VARIANTS[name]})
    raw, tensors = read(directory)
    reference = np.load(directory / "reference.npz")
    config, vocab_size = hf.config_from_hf(raw)
    actual = our_logits(config, vocab_size, tensors, reference["input_ids"])
    assert np.abs(reference["logits"]).max() > 2
    assert np.abs(actual - reference["logits"]).max() <= 1e-5
    written = hf.config_to_hf(config, vocab_size=vocab_size, eos_id=raw["eos_token_id"], bos_id=raw["bos_token_id"])
    # The older name of the context, which llama.cpp reads.
    assert written == {key: raw.get(key) for key in written} | {"n_ctx": raw["n_positions"]}
    exported = hf.params_to_hf(config, hf.params_from_hf(config, vocab_size, tensors))
    assert exported.keys() == tensors.keys()
    for key, tensor in exported.items():
        assert tensor.flags.c_contiguous
        assert tensor.tobytes() == tensors[key].tobytes(), key
        assert tensor.shape == tensors[key].shape


@pytest.mark.parametrize(
    "fields",
    [
        {"scale_attn_by_inverse_layer_idx": True},
        {"activation_function": "gelu"},
        {"activation_function": "relu"},
        {"layer_norm_epsilon": 0.01},
        {"n_head": 2},
    ],
    ids=str,
)
def test_a_wrong_setting_would_be_noticed(tiny, fields):
    raw, tensors = read(tiny)
    reference = np.load(tiny / "reference.npz")
    config, vocab_size = hf.config_from_hf({**raw, **fields})
    actual = our_logits(config, vocab_size, tensors, reference["input_ids"])
    assert np.abs(actual - reference["logits"]).max() > 1e-4


def test_parameter_count_is_that_of_transformers(tiny):
    import transformers

    raw, _ = read(tiny)
    expected = transformers.GPT2LMHeadModel(transformers.GPT2Config(**TINY)).num_parameters()
    config, vocab_size = hf.config_from_hf(raw)
    assert parameter_count(config.spec(vocab_size)) == expected
    assert parameter_count(Gpt2Config().spec(50257)) == 124_439_808


def test_files_of_other_versions(tiny):
    raw, tensors = read(tiny)
    config, vocab_size = hf.config_from_hf(raw)
    expected = hf.params_from_hf(config, vocab_size, tensors)
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old["lm_head.weight"] = old["wte.weight"].copy()
    old["h.0.attn.bias"] = np.ones((1, 1, 64, 64), bool)
    old["h.2.attn.masked_bias"] = np.array(-1e4, np.float32)
    actual = hf.params_from_hf(config, vocab_size, old)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    old_config = {key: value for key, value in raw.items() if key not in ("n_positions", "n_inner")}
    old_config |= {"n_ctx": 64, "activation_function": "gelu_pytorch_tanh", "torch_dtype": "float32"}
    assert hf.config_from_hf(old_config) == (config, vocab_size)


def test_dtypes_are_kept(tiny):
    import ml_dtypes

    raw, tensors = read(tiny)
    config, vocab_size = hf.config_from_hf(raw)
    half = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    params = hf.params_from_hf(config, vocab_size, half)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(ml_dtypes.bfloat16)}
    exported = hf.params_to_hf(config, params)
    assert all(np.array_equal(exported[name], tensor) for name, tensor in half.items())


def test_tensors_that_do_not_fit(tiny):
    raw, tensors = read(tiny)
    config, vocab_size = hf.config_from_hf(raw)

    def message(**changes: np.ndarray | None) -> str:
        broken = {**tensors, **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
        with pytest.raises(UserError) as error:
            hf.params_from_hf(config, vocab_size, {k: v for k, v in broken.items() if v is not None})
        return str(error.value)

    assert "transformer.h.1.mlp.c_fc.weight is missing" in message(transformer__h__1__mlp__c_fc__weight=None)
    assert "transformer.h.3.ln_1.weight is unknown" in message(transformer__h__3__ln_1__weight=np.ones(32))
    text = message(transformer__wpe__weight=np.ones((63, 32), np.float32), transformer__ln_f__bias=np.ones(2))
    assert "transformer.wpe.weight has the shape [63, 32], expected [64, 32]" in text
    assert "transformer.ln_f.bias has the shape [2], expected [32]" in text
    assert "lm_head.weight differs from transformer.wte.weight" in message(lm_head__weight=np.ones((67, 32)))
    assert "are the same tensor" in message(wte__weight=tensors["transformer.wte.weight"])
    with pytest.raises(UserError, match=r"and \d+ more"):
        hf.params_from_hf(config, vocab_size, {})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "bert"}, "model_type='bert' is not supported; supported: apertus, "),
        ({"n_inner": 33}, "n_inner=33 is not supported, only multiples of n_embd=32"),
        ({"scale_attn_weights": False}, "scale_attn_weights=False is not supported, only True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False is not supported"),
        ({"add_cross_attention": True}, "add_cross_attention=True is not supported"),
        ({"activation_function": "mish"}, "activation_function"),
        ({"n_head": 5}, "is not a multiple of"),
        ({"n_layer": "many"}, "n_layer"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_configurations_without_a_counterpart(tiny, fields, message):
    raw, _ = read(tiny)
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        hf.config_from_hf({**raw, **fields})


def test_what_the_format_has_no_place_for():
    config = Gpt2Config(hidden_dim=32, num_heads=4, num_layers=1, seq_len=8, use_bias=False)
    with pytest.raises(UserError, match="use_bias: false"):
        hf.config_to_hf(config, vocab_size=7, eos_id=0, bos_id=None)
    params = quick_jit(lambda: nnx.to_pure_dict(nnx.state(config.build(7, rngs=nnx.Rngs(0)), nnx.Param)))()
    with pytest.raises(UserError, match="use_bias: false"):
        hf.params_to_hf(config, params)
    with pytest.raises(UserError, match=r"not those of this configuration: .*blocks\.0\.mlp\.up\.bias"):
        hf.params_to_hf(Gpt2Config(**{**config.model_dump(), "use_bias": True}), params)


def test_transformers_loads_what_is_written(tmp_path):
    import torch
    import transformers
    from safetensors.numpy import save_file

    config = Gpt2Config(
        seq_len=32, hidden_dim=32, num_layers=2, num_heads=2, mlp_scale=3, activation_function="relu",
        scale_attn_by_inverse_layer_idx=True, initializer_range=0.2,
    )  # fmt: skip
    params = quick_jit(lambda: nnx.to_pure_dict(nnx.state(config.build(31, rngs=nnx.Rngs(0)), nnx.Param)))()
    written = hf.config_to_hf(config, vocab_size=31, eos_id=3, bos_id=None)
    (tmp_path / "config.json").write_text(json.dumps(written), encoding="utf-8")
    save_file(hf.params_to_hf(config, params), tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded: Any = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = np.random.default_rng(0).integers(0, 31, (2, 20))
    with torch.no_grad():
        expected = model.eval()(torch.from_numpy(ids)).logits.numpy()
    assert np.abs(our_logits(config, 31, hf.params_to_hf(config, params), ids) - expected).max() <= 1e-5
