"""Every family against transformers on torch, through files: what is read, what is computed, what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from lm_trainer.core.errors import UserError
from lm_trainer.models import MODEL_CONFIGS, DecoderConfig, hf
from lm_trainer.models.hf_table import HfFamily
from lm_trainer.nn.decoder import Decoder
from lm_trainer.profile.flops import parameter_count
from tests.models.common import TINY, VOCAB, change
from tests.models.hf_checkpoints import CHECKPOINTS, LINEAR, LLAMA3, build, read


def our_logits(config: DecoderConfig, vocab_size: int, tensors: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Not compiled: the operations of one family serve the others, and a program of each would not."""
    spec = change(config, scan_layers=False, gradient_checkpointing=False).spec(vocab_size)
    graph = nnx.split(nnx.eval_shape(lambda: Decoder(spec, rngs=nnx.Rngs(0))), nnx.Param)[0]
    params = hf.params_from_hf(config, vocab_size, tensors)
    positions = jnp.tile(jnp.arange(ids.shape[1], dtype=jnp.int32), (len(ids), 1))
    return np.asarray(nnx.merge(graph, params)(jnp.asarray(ids, jnp.int32), positions, jnp.zeros_like(positions)))


def compare(directory: Path) -> np.ndarray:
    """The logits of the reference, after ours were found to be equal."""
    raw, tensors = read(directory)
    reference = np.load(directory / "reference.npz")
    config, vocab_size = hf.config_from_hf(raw)
    actual = our_logits(config, vocab_size, tensors, reference["input_ids"])
    assert np.abs(actual - reference["logits"]).max() <= 1e-4
    return reference["logits"]


def test_every_family_is_compared():
    families = {config.hf.model_type for config in MODEL_CONFIGS if isinstance(config.hf, HfFamily)}
    assert families - {"gpt2", "gemma3_text", "whisper"} == CHECKPOINTS.keys() - {"gemma3"}


QUICK = ("mpt",)
"""Families whose settings are compared in every run of the tests; the others among the slow ones."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CHECKPOINTS]
)
def test_logits_of_every_setting(make_hf_model, name):
    """Each change moves the reference and moves us with it, so a setting that were misread would be noticed."""
    plain = compare(build(make_hf_model, name))
    for changes in CHECKPOINTS[name][2]:
        moved = compare(build(make_hf_model, name, **changes))
        assert np.abs(moved - plain).max() > 1e-3, changes


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_import_and_export_lose_nothing(make_hf_model, name, tmp_path):
    import torch
    import transformers

    directory = build(make_hf_model, name)
    raw, tensors = read(directory)
    config, vocab_size = hf.config_from_hf(raw)
    params = hf.params_from_hf(config, vocab_size, tensors)
    exported = hf.params_to_hf(config, params)
    assert exported.keys() == tensors.keys()
    for key, tensor in exported.items():
        assert tensor.flags.c_contiguous
        assert tensor.tobytes() == tensors[key].tobytes(), key
        assert tensor.shape == tensors[key].shape
    written = hf.config_to_hf(config, vocab_size=vocab_size, eos_id=raw["eos_token_id"], bos_id=raw["bos_token_id"])
    assert hf.config_from_hf(written) == (config, vocab_size)
    (tmp_path / "config.json").write_text(json.dumps(written), encoding="utf-8")
    save_file(exported, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model_class = getattr(transformers, raw["architectures"][0])
    loaded: Any = model_class.from_pretrained(tmp_path, output_loading_info=True, attn_implementation="eager")
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    # Gemma 4's factors of layers are trained here, and buffers there.
    factors = sum(x.numel() for key, x in model.named_buffers() if key.endswith("layer_scalar"))
    assert sum(p.numel() for p in model.parameters()) + factors == parameter_count(config.spec(vocab_size))
    reference = np.load(directory / "reference.npz")
    with torch.no_grad():
        logits = model.float().eval()(torch.from_numpy(reference["input_ids"])).logits.numpy()
    assert np.abs(logits - reference["logits"]).max() <= 1e-6


@pytest.mark.slow
def test_a_selection_bias_selects_as_in_transformers(make_hf_model, tmp_path):
    import torch
    import transformers

    directory = build(make_hf_model, "glm4_moe")
    raw, tensors = read(directory)
    rng = np.random.default_rng(0)
    biases = {name: x for name, x in tensors.items() if name.endswith("e_score_correction_bias")}
    assert len(biases) == 2
    tensors |= {name: rng.normal(0.0, 0.5, x.shape).astype(np.float32) for name, x in biases.items()}
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded: Any = transformers.Glm4MoeForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    reference = np.load(directory / "reference.npz")
    with torch.no_grad():
        logits = loaded.float().eval()(torch.from_numpy(reference["input_ids"])).logits.numpy()
    assert np.abs(logits - reference["logits"]).max() > 1e-3
    config, vocab_size = hf.config_from_hf(raw)
    assert np.abs(our_logits(config, vocab_size, tensors, reference["input_ids"]) - logits).max() <= 1e-4


def test_constants_in_a_file_are_checked(make_hf_model):
    raw, tensors = read(build(make_hf_model, "apertus"))
    config, vocab_size = hf.config_from_hf(raw)
    name = "model.layers.1.mlp.act_fn.beta"
    params = hf.params_from_hf(config, vocab_size, {key: x for key, x in tensors.items() if key != name})
    assert hf.params_to_hf(config, params)[name].tobytes() == tensors[name].tobytes()
    with pytest.raises(UserError, match=rf"{name} is 0.25; only 0.5 is supported"):
        hf.params_from_hf(config, vocab_size, {**tensors, name: np.asarray(0.25, np.float32)})
    # What is rounded to 16 bits is the same constant.
    rounded = {key: x.astype(np.float16) if x.ndim == 0 else x for key, x in tensors.items()}
    hf.params_from_hf(config, vocab_size, rounded)


def test_older_spellings_of_rope(make_hf_model):
    """transformers 4 writes theta and scaling at the top."""
    for name, changes in {"llama": {"rope_parameters": LLAMA3}, "gemma3": {}, "gpt_neox": {}}.items():
        raw, _ = read(build(make_hf_model, name, **changes))
        config, vocab_size = hf.config_from_hf(raw)
        written = hf.config_to_hf(config, vocab_size=vocab_size, eos_id=2, bos_id=1)
        del written["rope_parameters"]
        assert hf.config_from_hf(written) == (config, vocab_size), name


def test_a_tied_head_may_be_repeated_but_not_differ(make_hf_model):
    raw, tensors = read(build(make_hf_model, "llama", tie_word_embeddings=True))
    config, vocab_size = hf.config_from_hf(raw)
    repeated = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    expected = hf.params_to_hf(config, hf.params_from_hf(config, vocab_size, tensors))
    assert expected.keys() == tensors.keys()
    actual = hf.params_to_hf(config, hf.params_from_hf(config, vocab_size, repeated))
    assert all(np.array_equal(actual[name], tensor) for name, tensor in expected.items())
    with pytest.raises(UserError, match=r"lm_head\.weight differs"):
        hf.params_from_hf(config, vocab_size, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1})


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("llama", {"attention_bias": True}, "attention_bias=True with mlp_bias=False is not supported"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic"}},
            r"'dynamic' is not supported \(its freq.*\); supported: def",
        ),
        ("llama", {"rope_parameters": {**LINEAR, "odd": 1}}, "odd of rope_type='linear' has no counterpart"),
        ("llama", {"num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "layer_types is not supported"),
        ("gemma3", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types is not supported"),
        ("gemma3", {"attn_logit_softcapping": 9.0}, "attn_logit_softcapping=9.0 is not supported, only None is"),
        ("gemma2", {"attention_bias": True}, "attention_bias=True is not supported, only False"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi=False is not supported"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than"),
        ("smollm3", {"attention_bias": True}, "attention_bias=True is not supported, only False"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 4}, "layer_types is not supported where it differs"),
        ("granite", {"mlp_bias": True}, "mlp_bias=True is not supported, only False"),
        ("cohere2", {"attention_bias": True}, "attention_bias=True is not supported, only False"),
        ("cohere2", {"sliding_window": None}, "sliding_window: Input should be a valid integer"),
        ("cohere2", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "layer_types is not supported"),
        ("starcoder2", {"hidden_act": "mish"}, "hidden_act: Input should be 'gelu'"),
        ("glm4", {"head_dim": 5}, "head_dim: Input should be a multiple of 2"),
        ("arcee", {"mlp_bias": True}, "mlp_bias=True is not supported, only False"),
        ("seed_oss", {"mlp_bias": True}, "mlp_bias=True is not supported, only False"),
        ("nanochat", {"attention_bias": True}, "attention_bias=True is not supported, only False"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported, only 'sigmoid'"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group=5 of n_group=4 groups do not have num_experts_per_tok=3"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True is not supported, only False"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported, only 'greedy' and"),
        ("qwen3_next", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types is not supported"),
        ("qwen3_next", {"attention_bias": True}, "attention_bias=True is not supported, only False"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate=False is not supported, only True"),
        ("qwen3_5_moe_text", {"mlp_only_layers": [1]}, r"the meaning of mlp_only_layers=\[1\] in"),
        ("mamba2", {"hidden_act": "relu"}, "hidden_act='relu' is not supported, only 'silu'"),
        ("mamba2", {"expand": 3}, "num_heads=4 of head_dim=16 are not expand=3 times hidden_size=32"),
        ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is not supported"),
        ("llama4_text", {"layer_types": ["full_attention"] * 4}, "layer_types is not supported"),
        ("gemma4_text", {"num_kv_shared_layers": 3}, "num_kv_shared_layers=3 of 4 layers leaves no layer of the kind"),
        ("gemma4_text", {"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input must equal vocab_size"),
        ("gemma4_text", {"num_experts": None}, "enable_moe_block=True without num_experts"),
        ("gemma4_text", {"per_layer_config": {"1": {"head_dim": 16}}}, "per_layer_config is not supported, except for"),
        ("granitemoehybrid", {"hidden_act": "relu"}, "hidden_act=.relu. is not supported, only .silu."),
        ("granitemoehybrid", {"mamba_expand": 3}, "mamba_n_heads=4 of mamba_d_head=16 are not mamba_expand=3 times"),
        ("granitemoehybrid", {"num_experts_per_tok": 0}, "num_experts_per_tok=0 of n_routed_experts=4 leave out all"),
        ("minicpm3", {"mlp_bias": True}, "mlp_bias=True is not supported, only False"),
        ("minicpm3", {"num_key_value_heads": 2}, "num_key_value_heads is not supported where it differs"),
        ("apertus", {"attention_bias": True}, "attention_bias=True is not supported, only False"),
    ],
)
def test_configurations_without_a_counterpart(make_hf_model, name, fields, message):
    raw, _ = read(build(make_hf_model, name))
    with pytest.raises(UserError, match=message):
        hf.config_from_hf({**raw, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope": {"type": "yarn", "factor": 2.0}}, "rope: yarn has no place in the format"),
        ({"attention_k_eq_v": False}, "num_global_kv_heads has no place in the format"),
    ],
)
def test_what_the_format_of_gemma4_has_no_place_for(fields, message):
    with pytest.raises(UserError, match=message):
        hf.config_to_hf(change(TINY["gemma4"], **fields), vocab_size=VOCAB, eos_id=2, bos_id=1)


@pytest.mark.parametrize(
    "fields",
    [{"hybrid_norm": True}, {"use_qk_norm": True}, {"input_embedding_norm": True}, {"use_layer_norm_weight": False}],
)
def test_what_the_format_has_no_place_for(make_hf_model, fields):
    raw, _ = read(build(make_hf_model, "llama"))
    config, vocab_size = hf.config_from_hf(raw)
    with pytest.raises(UserError, match=f"no place for {next(iter(fields))}"):
        hf.config_to_hf(change(config, **fields), vocab_size=vocab_size, eos_id=2, bos_id=1)
