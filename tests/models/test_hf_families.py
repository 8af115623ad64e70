"""Every family against transformers on torch, through files: what is read, what is computed, what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from lm_trainer.core.errors import UserError
from lm_trainer.models import MODEL_CONFIGS, DecoderConfig, hf
from lm_trainer.models.hf_table import HfFamily
from lm_trainer.nn.decoder import Decoder
from lm_trainer.profile.flops import parameter_count
from tests.models.common import change

WINDOW = 16
"""A third of the reference input's length."""
SHARED: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WITHOUT_KV_HEADS = {key: value for key, value in SHARED.items() if key != "num_key_value_heads"}
LATENT = {"kv_lora_rank": 10, "q_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
DEEPSEEK_EXPERTS = {"num_hidden_layers": 3, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_group": 4,
                    "topk_group": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 9.0],
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
SCALARS = [{"rms_norm_eps": 0.1}, {"hidden_act": "relu"}, {"rope_parameters": {**PLAIN, "rope_theta": 100.0}}]
GEMMA_SCALARS = [{"query_pre_attn_scalar": 4}, {"attn_logit_softcapping": 1.0}, {"final_logit_softcapping": 1.0}]

CHECKPOINTS: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "llama": (
        "Llama",
        SHARED,
        [*SCALARS, {"rope_parameters": LINEAR}, {"rope_parameters": LLAMA3}, {"rope_parameters": YARN},
         {"rope_parameters": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0}},
         {"rope_parameters": {**YARN, "attention_factor": 2.0}}, {"num_key_value_heads": 4},
         {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}, {"head_dim": 12}],
    ),
    "mistral": ("Mistral", {**SHARED, "sliding_window": WINDOW, "head_dim": 12}, [{"sliding_window": 8}, *SCALARS]),
    "qwen2": (
        "Qwen2",
        {**SHARED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        [{"use_sliding_window": False}, {"max_window_layers": 0}, {"sliding_window": 8}, *SCALARS],
    ),
    "qwen3": ("Qwen3", {**SHARED, "head_dim": 12}, SCALARS),
    "olmo2": ("Olmo2", SHARED, SCALARS),
    "olmo3": (
        "Olmo3",
        {**SHARED, "sliding_window": WINDOW, "num_hidden_layers": 4,
         "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}},
        [{"sliding_window": 8}, {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}},
         {"rope_parameters": {"full_attention": YARN, "sliding_attention": {**PLAIN, "rope_theta": 100.0}}}],
    ),
    "gemma": ("Gemma", {**SHARED, "num_key_value_heads": 1, "head_dim": 12}, SCALARS),
    "gemma2": (
        "Gemma2",
        {**SHARED, "head_dim": 12, "sliding_window": WINDOW},
        [*GEMMA_SCALARS, {"sliding_window": 8}, {"hidden_activation": "relu"}],
    ),
    "gemma3": (
        "Gemma3Text",
        {**SHARED, "head_dim": 12, "sliding_window": WINDOW, "num_hidden_layers": 7,
         "rope_parameters": {"full_attention": LINEAR, "sliding_attention": PLAIN}},
        [{"query_pre_attn_scalar": 4}, {"final_logit_softcapping": 1.0}, {"sliding_window": 8},
         {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}},
         {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {**PLAIN, "rope_theta": 100.0}}}],
    ),
    "phi3": (
        "Phi3",
        {**SHARED, "sliding_window": WINDOW},
        [{"sliding_window": 8}, {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}, *SCALARS,
         {"rope_parameters": LONG, "original_max_position_embeddings": 32},
         {"rope_parameters": LONG, "original_max_position_embeddings": 64},
         {"rope_parameters": {**LONG, "attention_factor": 2.0}, "original_max_position_embeddings": 32}],
    ),
    "smollm3": (
        "SmolLM3",
        {**SHARED, "num_hidden_layers": 4, "no_rope_layer_interval": 2},
        [{"no_rope_layer_interval": 3}, {"no_rope_layers": [0, 1, 1, 1]}, {"tie_word_embeddings": False},
         {"use_sliding_window": True, "sliding_window": WINDOW}, *SCALARS],
    ),
    "granite": (
        "Granite",
        {**SHARED, "embedding_multiplier": 3.0, "attention_multiplier": 0.5, "residual_multiplier": 0.7,
         "logits_scaling": 1.5},
        [{"embedding_multiplier": 1.5}, {"attention_multiplier": 0.25}, {"residual_multiplier": 1.0},
         {"logits_scaling": 3.0}, {"tie_word_embeddings": True}, *SCALARS],
    ),
    "cohere2": (
        "Cohere2",
        {**SHARED, "num_hidden_layers": 3, "sliding_window": WINDOW, "logit_scale": 0.5,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        [{"sliding_window": 8}, {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
         {"logit_scale": 1.5}, {"tie_word_embeddings": False}, {"layer_norm_eps": 0.1}, {"hidden_act": "relu"},
         {"rope_parameters": {**PLAIN, "rope_theta": 100.0}}, {"rope_parameters": LINEAR}],
    ),
    "starcoder2": (
        "Starcoder2",
        {**SHARED, "sliding_window": WINDOW},
        [{"sliding_window": 8}, {"use_bias": False}, {"norm_epsilon": 0.1}, {"hidden_act": "relu"},
         {"tie_word_embeddings": False}, {"num_key_value_heads": 1},
         {"rope_parameters": {**PLAIN, "rope_theta": 100.0}}],
    ),
    "glm4": (
        "Glm4",
        {**SHARED, "head_dim": 12},
        [{"attention_bias": False}, {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}},
         {"tie_word_embeddings": True}, *SCALARS],
    ),
    "arcee": (
        "Arcee",
        {**SHARED, "head_dim": 12},
        [{"hidden_act": "silu"}, {"rms_norm_eps": 0.1}, {"rope_parameters": YARN}, {"tie_word_embeddings": True}],
    ),
    "seed_oss": (
        "SeedOss",
        {**SHARED, "head_dim": 12},
        [{"attention_bias": False}, {"attention_out_bias": True}, {"tie_word_embeddings": True}, *SCALARS],
    ),
    "nanochat": (
        "NanoChat",
        SHARED,
        [{"final_logit_softcapping": 1.0}, {"tie_word_embeddings": True}, {"rms_norm_eps": 0.1}, {"hidden_act": "silu"},
         {"rope_parameters": {**PLAIN, "rope_theta": 100.0}}, {"head_dim": 12}],
    ),
    "apertus": (
        "Apertus",
        {**SHARED, "rope_parameters": LLAMA3},
        [{"rope_parameters": PLAIN}, {"hidden_act": "relu"}, {"rms_norm_eps": 0.1}, {"tie_word_embeddings": True},
         {"head_dim": 12}],
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {**SHARED, "num_key_value_heads": 4, **LATENT, **DEEPSEEK_EXPERTS},
        [{"q_lora_rank": None}, {"v_head_dim": 12}, {"attention_bias": True}, {"rope_interleave": False},
         {"num_experts_per_tok": 1}, {"norm_topk_prob": False}, {"routed_scaling_factor": 1.0}, {"topk_group": 3},
         {"n_group": 1, "topk_group": 1}, {"first_k_dense_replace": 3}, {"n_shared_experts": 2},
         {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}, {"rms_norm_eps": 0.1}],
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {**SHARED, "num_key_value_heads": 4, **LATENT, **DEEPSEEK_EXPERTS, "topk_method": "group_limited_greedy"},
        [{"q_lora_rank": None}, {"topk_method": "greedy"}, {"num_experts_per_tok": 1}, {"topk_group": 3},
         {"routed_scaling_factor": 1.5}, {"first_k_dense_replace": 0}, {"n_shared_experts": 1},
         {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}, {"rms_norm_eps": 0.1}],
    ),
    "qwen3_next": (
        "Qwen3Next",
        # With larger weights, float32 rounds by more than the tolerance.
        {**SHARED, "initializer_range": 0.1, "num_hidden_layers": 2, "head_dim": 12,
         "layer_types": ["linear_attention", "full_attention"],
         "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 8,
         "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1],
         "shared_expert_intermediate_size": 40, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
        [{"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
         {"linear_num_key_heads": 4},
         {"linear_conv_kernel_dim": 3}, {"linear_value_head_dim": 6}, {"norm_topk_prob": False},
         {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}}, {"rms_norm_eps": 0.1},
         {"mlp_only_layers": [0, 1]}],
    ),
    "minicpm3": (
        "MiniCPM3",
        {**SHARED, "num_key_value_heads": 4, **LATENT},
        [{"q_lora_rank": None}, {"attention_bias": True}, {"scale_emb": 3.0}, {"scale_depth": 1.0},
         {"dim_model_base": 16}, {"tie_word_embeddings": False},
         {"rope_parameters": {**YARN, "mscale_all_dim": 2.0}}, *SCALARS],
    ),
    "mamba2": (
        "Mamba2",
        {**{key: SHARED[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "initializer_range",
                                         "bos_token_id", "eos_token_id", "pad_token_id")},
         "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 16},
        [{"state_size": 6}, {"n_groups": 1}, {"conv_kernel": 3}, {"use_bias": True}, {"use_conv_bias": False},
         {"layer_norm_epsilon": 0.1}, {"tie_word_embeddings": True}, {"time_step_limit": (0.4, 0.6)},
         {"head_dim": 8, "num_heads": 8}],
    ),
    "gpt_neox": (
        "GPTNeoX",
        WITHOUT_KV_HEADS,
        [{"use_parallel_residual": False}, {"layer_norm_eps": 0.1}, {"hidden_act": "relu"}, {"attention_bias": False},
         {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}],
    ),
    "mixtral": (
        "Mixtral",
        {**SHARED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        [{"num_experts_per_tok": 1}, {"sliding_window": 8}, *SCALARS],
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {**SHARED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 12},
        [{"num_experts_per_tok": 1}, {"norm_topk_prob": True}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}],
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {**SHARED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "shared_expert_intermediate_size": 40},
        [{"num_experts_per_tok": 1}, {"norm_topk_prob": True}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2},
         {"qkv_bias": False}, *SCALARS],
    ),
    "olmoe": (
        "Olmoe",
        {**SHARED, "num_experts": 4, "num_experts_per_tok": 2},
        [{"num_experts_per_tok": 1}, {"norm_topk_prob": True}, {"clip_qkv": 0.5}, *SCALARS],
    ),
    "glm4_moe": (
        "Glm4Moe",
        {**SHARED, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 12,
         "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "num_hidden_layers": 3,
         "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
        [{"num_experts_per_tok": 1}, {"norm_topk_prob": False}, {"first_k_dense_replace": 2},
         {"n_group": 1, "topk_group": 1}, {"topk_group": 1}, {"routed_scaling_factor": 1.0}, {"n_shared_experts": 2},
         {"use_qk_norm": True}, {"attention_bias": True},
         {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}}],
    ),
    "gpt_oss": (
        "GptOss",
        {**SHARED, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12, "sliding_window": WINDOW,
         "rope_parameters": {**YARN, "truncate": False}},
        [{"num_experts_per_tok": 1}, {"sliding_window": 8}, {"layer_types": ["sliding_attention"] * 2},
         {"swiglu_alpha": 1.0}, {"swiglu_limit": 0.5}, {"attention_bias": False}, {"rope_parameters": YARN},
         {"rope_parameters": PLAIN}, {"rms_norm_eps": 0.1}, {"tie_word_embeddings": True}],
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {**SHARED, "initializer_range": 0.1, "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"],
         "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 40, "mamba_n_heads": 4,
         "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16,
         "position_embedding_type": "rope", "embedding_multiplier": 3.0, "attention_multiplier": 0.5,
         "residual_multiplier": 0.7, "logits_scaling": 1.5},
        [{"layer_types": ["attention", "mamba", "mamba"]}, {"position_embedding_type": None},
         {"num_local_experts": 0, "num_experts_per_tok": 0}, {"num_experts_per_tok": 1}, {"mamba_d_state": 6},
         {"mamba_n_groups": 1}, {"mamba_d_conv": 3}, {"mamba_proj_bias": True}, {"mamba_conv_bias": False},
         {"mamba_n_heads": 8, "mamba_d_head": 8}, {"time_step_limit": (0.4, 0.6)}, {"embedding_multiplier": 1.5},
         {"attention_multiplier": 0.25}, {"residual_multiplier": 1.0}, {"logits_scaling": 3.0},
         {"tie_word_embeddings": True}, {"rms_norm_eps": 0.1}, {"rope_parameters": {**PLAIN, "rope_theta": 100.0}}],
    ),
    "mpt": (
        "Mpt",
        {"vocab_size": 67, "d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 64,
         "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2},
        [{"layer_norm_epsilon": 0.1}, {"attn_config": {"clip_qkv": 0.5}},
         {"attn_config": {"softmax_scale": 1.0}}],
    ),
}  # fmt: skip
"""For each family what transformers calls it, a tiny configuration, and changes that each move its logits."""

MODEL_CLASSES = {"Gemma3Text": "Gemma3ForCausalLM"}


def build(make_hf_model: Any, name: str, **changes: Any) -> Path:
    family, config, _ = CHECKPOINTS[name]
    return make_hf_model(family, model_class=MODEL_CLASSES.get(family), **{**config, **changes})


def read(directory: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return raw, load_file(directory / "model.safetensors")


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


QUICK = ("llama", "gemma2", "mixtral", "mpt")
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
    assert sum(p.numel() for p in model.parameters()) == parameter_count(config.spec(vocab_size))
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
        ("mamba2", {"hidden_act": "relu"}, "hidden_act='relu' is not supported, only 'silu'"),
        ("mamba2", {"expand": 3}, "num_heads=4 of head_dim=16 are not expand=3 times hidden_size=32"),
        ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is not supported"),
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
    "fields",
    [{"hybrid_norm": True}, {"use_qk_norm": True}, {"input_embedding_norm": True}, {"use_layer_norm_weight": False}],
)
def test_what_the_format_has_no_place_for(make_hf_model, fields):
    raw, _ = read(build(make_hf_model, "llama"))
    config, vocab_size = hf.config_from_hf(raw)
    with pytest.raises(UserError, match=f"no place for {next(iter(fields))}"):
        hf.config_to_hf(change(config, **fields), vocab_size=vocab_size, eos_id=2, bos_id=1)
