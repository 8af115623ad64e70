"""Tiny checkpoints of every family, as transformers makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

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
                    "topk_group": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
                    # transformers writes 1, but saves no module.
                    "num_nextn_predict_layers": 0}  # fmt: skip
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
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
SCALARS = [{"rms_norm_eps": 0.1}, {"hidden_act": "relu"}, {"rope_parameters": {**PLAIN, "rope_theta": 100.0}}]
GEMMA_SCALARS = [{"query_pre_attn_scalar": 4}, {"attn_logit_softcapping": 1.0}, {"final_logit_softcapping": 1.0}]

# With larger weights, float32 rounds by more than the tolerance.
DELTA = {"initializer_range": 0.1, "num_hidden_layers": 2, "head_dim": 12,
         "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
         "linear_key_head_dim": 6, "linear_value_head_dim": 8}  # fmt: skip

GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}

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
    "gemma4_text": (
        "Gemma4Text",
        {**SHARED, "num_hidden_layers": 4, "head_dim": 12, "global_head_dim": 16, "num_global_key_value_heads": 1,
         "attention_k_eq_v": True, "sliding_window": WINDOW, **GEMMA4_EXPERTS,
         "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": SHARED["vocab_size"],
         "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
         "layer_types": ["sliding_attention", "full_attention"] * 2,
         "rope_parameters": {"full_attention": PROPORTIONAL, "sliding_attention": PLAIN}},
        [{"global_head_dim": 8}, {"num_global_key_value_heads": 2}, {"attention_k_eq_v": False}, {"sliding_window": 8},
         {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "num_kv_shared_layers": 0},
         {"num_kv_shared_layers": 1}, {"num_kv_shared_layers": 0}, {"use_double_wide_mlp": False},
         {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}, {"hidden_size_per_layer_input": 4},
         {"final_logit_softcapping": 1.0}, {"rms_norm_eps": 0.1}, {"hidden_activation": "relu"},
         {"num_key_value_heads": 4}, {"enable_moe_block": False}, {"top_k_experts": 1}, {"moe_intermediate_size": 20},
         {"rope_parameters": {"full_attention": {**PROPORTIONAL, "partial_rotary_factor": 1.0},
                              "sliding_attention": PLAIN}},
         {"rope_parameters": {"full_attention": {**PROPORTIONAL, "factor": 4.0}, "sliding_attention": PLAIN}},
         {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": {**PLAIN, "rope_theta": 100.0}}}],
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
         {"rope_parameters": {**PLAIN, "rope_theta": 100.0}}, {"rope_parameters": YARN}, {"head_dim": 12}],
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
        {**SHARED, **DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "mlp_only_layers": [1], "shared_expert_intermediate_size": 40,
         "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
        [{"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
         {"linear_num_key_heads": 4},
         {"linear_conv_kernel_dim": 3}, {"linear_value_head_dim": 6}, {"norm_topk_prob": False},
         {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}}, {"rms_norm_eps": 0.1},
         {"mlp_only_layers": [0, 1]}],
    ),
    "qwen3_5_text": (
        "Qwen3_5Text",
        {**SHARED, **DELTA, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5, "mrope_interleaved": True,
                                                "mrope_section": [1, 1, 1]}},
        [{"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
         {"linear_num_key_heads": 4}, {"linear_conv_kernel_dim": 3}, {"linear_value_head_dim": 6},
         {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}}, {"rms_norm_eps": 0.1}, {"head_dim": 16},
         {"tie_word_embeddings": True}],
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeText",
        {**{key: value for key, value in SHARED.items() if key != "intermediate_size"}, **DELTA, "num_experts": 4,
         "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
         "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
        [{"layer_types": ["full_attention"] * 2}, {"num_experts_per_tok": 1}, {"linear_num_key_heads": 4},
         {"rms_norm_eps": 0.1}, {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}}],
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
         "num_nextn_predict_layers": 0,
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
    "llama4_text": (
        "Llama4Text",
        {**SHARED, "num_hidden_layers": 4, "num_local_experts": 4, "intermediate_size": 24, "head_dim": 12,
         "intermediate_size_mlp": 40, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0, 1, 0],
         "attention_chunk_size": 7, "floor_scale": 4},
        [{"num_experts_per_tok": 2}, {"moe_layers": [0, 1]}, {"no_rope_layers": [1, 1, 1, 0]}, {"use_qk_norm": False},
         {"attention_chunk_size": 12}, {"attn_temperature_tuning": False}, {"floor_scale": 6}, {"attn_scale": 0.5},
         {"attention_bias": True}, {"tie_word_embeddings": True}, {"rms_norm_eps": 0.1},
         {"rope_parameters": {**PLAIN, "rope_theta": 100.0}}, {"rope_parameters": YARN},
         {"rope_parameters": YARN, "use_qk_norm": False}],
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

MODEL_CLASSES = {"Gemma3Text": "Gemma3ForCausalLM", "Llama4Text": "Llama4ForCausalLM",
                 "Gemma4Text": "Gemma4ForCausalLM", "Qwen3_5Text": "Qwen3_5ForCausalLM",
                 "Qwen3_5MoeText": "Qwen3_5MoeForCausalLM"}  # fmt: skip


def build(make_hf_model: Any, name: str, **changes: Any) -> Path:
    family, config, _ = CHECKPOINTS[name]
    return make_hf_model(family, model_class=MODEL_CLASSES.get(family), **{**config, **changes})


def read(directory: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return raw, load_file(directory / "model.safetensors")
