"""config.json files of old or unusual spelling against what transformers computes from them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.export.huggingface import read_hf_config
from lm_trainer.models import hf
from tests.models.common import change
from tests.models.hf_checkpoints import LLAMA3, LONG, YARN, build, read
from tests.models.test_hf_families import our_logits

GONE = object()
"""A key that the file lacks."""

OLD_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
OLD_LLAMA3 = {key: value for key, value in LLAMA3.items() if key not in ("rope_theta",)}
OLD_LONG = {"type": "longrope", "short_factor": LONG["short_factor"], "long_factor": LONG["long_factor"]}


def without(block: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in block.items() if key not in keys}


OLD_CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("gemma", {"hidden_act": "gelu"}),
    ("gemma", {"hidden_act": GONE}),
    ("gemma2", {"hidden_activation": "gelu"}),
    ("gemma2", {"hidden_activation": GONE, "hidden_act": "relu"}),
    ("gemma3", {"hidden_activation": "gelu"}),
    ("gemma4_text", {"rope_parameters": GONE, "rms_norm_eps": GONE, "final_logit_softcapping": GONE}),
    ("gemma4_text", {"per_layer_config": GONE, "global_head_dim": 16, "num_global_key_value_heads": 1}),
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"hidden_act": "gelu_new"}),
    ("llama", {"hidden_act": "gelu_fast"}),
    ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    ("llama", {"hidden_act": "swish"}),
    ("gpt_neox", {"hidden_act": "gelu_fast"}),
    ("gpt_neox", {"hidden_act": GONE}),
    ("gpt_neox", {"rope_parameters": GONE, "rotary_pct": 1.0, "rope_theta": 100.0, "rotary_emb_base": 500.0}),
    ("gpt_neox", {"rope_parameters": GONE, "rotary_pct": 1.0, "rope_theta": 100.0}),
    ("llama", {"rope_parameters": GONE, "rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500.0}),
    ("llama", {"rope_parameters": GONE, "rope_scaling": OLD_LLAMA3, "rope_theta": 5e5}),
    ("llama", {"rope_parameters": GONE, "rope_scaling": OLD_YARN}),
    ("llama", {"rope_parameters": without(YARN, "original_max_position_embeddings")}),
    ("llama", {"rope_parameters": without(LLAMA3, "original_max_position_embeddings")}),
    ("llama", {"rope_parameters": YARN, "original_max_position_embeddings": 16}),
    ("llama", {"rope_parameters": {**LONG, "original_max_position_embeddings": 32}}),
    ("llama", {"rope_parameters": LONG, "original_max_position_embeddings": 32}),
    ("llama", {"rms_norm_eps": GONE, "rope_parameters": GONE, "tie_word_embeddings": GONE}),
    ("mistral", {"sliding_window": GONE, "rms_norm_eps": GONE}),
    ("qwen2", {"use_sliding_window": GONE, "layer_types": GONE}),
    ("olmo2", {"rms_norm_eps": GONE, "rope_parameters": GONE}),
    ("phi3", {"rope_parameters": GONE, "rope_scaling": OLD_LONG, "original_max_position_embeddings": 32}),
    ("phi3", {"rope_parameters": {**LONG, "original_max_position_embeddings": 16},
              "original_max_position_embeddings": 32}),
    ("phi3", {"rms_norm_eps": GONE, "sliding_window": GONE}),
    ("smollm3", {"no_rope_layers": GONE, "layer_types": GONE, "rope_parameters": GONE}),
    ("smollm3", {"no_rope_layers": [0, 1, 1, 0, 1, 0], "tie_word_embeddings": GONE}),
    ("granite", {"attention_multiplier": GONE, "logits_scaling": GONE, "rope_parameters": GONE}),
    ("cohere2", {"layer_types": GONE, "logit_scale": GONE}),
    ("cohere2", {"layer_types": GONE, "sliding_window_pattern": 2, "sliding_window": GONE}),
    ("starcoder2", {"norm_epsilon": GONE, "hidden_act": GONE, "use_bias": GONE, "sliding_window": GONE}),
    ("glm4", {"rope_parameters": GONE, "rope_theta": 500.0, "rms_norm_eps": GONE, "attention_bias": GONE}),
    ("apertus", {"rope_parameters": GONE, "rope_theta": 500.0}),
    ("qwen3_5_text", {"layer_types": GONE, "full_attention_interval": 2, "rms_norm_eps": GONE}),
    ("qwen3_5_moe_text", {"rope_parameters": GONE, "router_aux_loss_coef": GONE}),
    ("mamba2", {"time_step_limit": [0.0, float("inf")], "layer_norm_epsilon": GONE, "chunk_size": GONE}),
    ("deepseek_v3", {"norm_topk_prob": GONE, "rope_interleave": GONE, "rope_parameters": GONE}),
    ("deepseek_v2", {"topk_method": GONE, "routed_scaling_factor": GONE}),
    ("minicpm3", {"scale_depth": None, "dim_model_base": None, "rms_norm_eps": GONE, "rope_parameters": GONE}),
    ("minicpm3", {"scale_depth": GONE, "dim_model_base": GONE, "scale_emb": GONE, "v_head_dim": GONE}),
    ("nanochat", {"rope_parameters": GONE, "final_logit_softcapping": GONE, "hidden_act": GONE, "rms_norm_eps": GONE}),
    ("nanochat", {"final_logit_softcapping": None}),
    ("granitemoehybrid", {"mamba_d_head": "auto", "mamba_expand": GONE, "time_step_limit": GONE}),
    ("granitemoehybrid", {"layer_types": GONE, "layers_block_type": ["mamba", "attention", "mamba"],
                          "rope_parameters": GONE, "rope_theta": 500.0}),
    ("gpt_oss", {"rope_parameters": GONE, "layer_types": GONE, "swiglu_alpha": GONE, "swiglu_limit": GONE}),
    ("gpt_oss", {"rope_parameters": GONE, "rope_scaling": OLD_YARN, "rope_theta": 500.0, "attention_bias": GONE}),
    ("apertus", {"rope_parameters": GONE, "rope_scaling": OLD_LLAMA3, "rope_theta": 500.0, "hidden_act": GONE}),
]  # fmt: skip
"""A family, and the edits of a config.json that transformers 5 wrote."""


_SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN35 = {"attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
          "full_attention_interval": 2, "head_dim": 16, "hidden_act": "silu", "initializer_range": 0.1,
          "linear_conv_kernel_dim": 4,
          "layer_types": ["linear_attention", "full_attention"] * 2, "linear_key_head_dim": 8,
          "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 8,
          "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
          "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "use_cache": True,
          "rope_parameters": {"mrope_interleaved": True, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25,
                              "rope_theta": 10000000, "rope_type": "default"}}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "Phi-4": {"model_type": "phi3", "original_max_position_embeddings": 64, "rms_norm_eps": 1e-5, "pad_token_id": 3,
              "rope_scaling": None, "rope_theta": 250000, "sliding_window": None, "tie_word_embeddings": False,
              "embd_pdrop": 0.0, "resid_pdrop": 0.0, "hidden_act": "silu"},
    "Phi-4-mini": {"model_type": "phi3", "original_max_position_embeddings": 32, "partial_rotary_factor": 0.75,
                   "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 2.0, 9]},
                   "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "pad_token_id": 3,
                   "attention_bias": False, "mlp_bias": False, "lm_head_bias": False, "interpolate_factor": 1,
                   "full_attn_mod": 1, "rms_norm_eps": 1e-5},
    "SmolLM3": {"model_type": "smollm3", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 2,
                "layer_types": ["full_attention"] * 4, "max_window_layers": 28, "no_rope_layer_interval": 4,
                "no_rope_layers": [1, 1, 1, 0], "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 5000000.0,
                "sliding_window": None, "use_sliding_window": False, "pad_token_id": 3},
    "Granite 3": {"model_type": "granite", "attention_bias": False, "attention_dropout": 0.1, "pad_token_id": 0,
                  "attention_multiplier": 0.125, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
                  "mlp_bias": False, "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_scaling": None,
                  "rope_theta": 10000.0, "tie_word_embeddings": True},
    "Command R7B": {"model_type": "cohere2", "attention_bias": False, "head_dim": 8, "layer_norm_eps": 1e-5,
                    "layer_switch": 4, "logit_scale": 0.25, "order_of_interleaved_layers": "local_attn_first",
                    "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000,
                    "rotary_pct": 1.0, "sliding_window": 16, "sliding_window_pattern": 4, "pad_token_id": 0,
                    "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True},
    "StarCoder2 3B": {"model_type": "starcoder2", "activation_function": "gelu", "attention_softmax_in_fp32": True,
                      "attention_dropout": 0.1, "embedding_dropout": 0.1, "residual_dropout": 0.1,
                      "hidden_act": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-5, "norm_epsilon": 1e-5,
                      "mlp_type": "default", "norm_type": "layer_norm", "rope_theta": 999999.4420358813,
                      "sliding_window": 16, "use_bias": True, "scale_attention_softmax_in_fp32": True},
    "GLM-4": {"model_type": "glm4", "attention_bias": True, "head_dim": 8, "partial_rotary_factor": 0.5,
              "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "pad_token_id": 3},
    "AFM": {"model_type": "arcee", "attention_bias": False, "head_dim": 12, "hidden_act": "relu2", "mlp_bias": False,
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
            "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0, "rope_type": "yarn",
                             "original_max_position_embeddings": 32, "type": "yarn"}},
    "Seed-OSS": {"model_type": "seed_oss", "attention_bias": True, "attention_dropout": 0.1, "residual_dropout": 0.1,
                 "attention_out_bias": False, "head_dim": 16, "mlp_bias": False, "pad_token_id": 1,
                 "rms_norm_eps": 1e-6, "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0,
                 "tie_word_embeddings": False},
    "Apertus": {"model_type": "apertus", "attention_bias": False, "hidden_act": "xielu", "mlp_bias": False,
                "post_norm": False, "qk_norm": True, "rms_norm_eps": 1e-5, "rope_theta": 12000000,
                "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                                 "original_max_position_embeddings": 32, "rope_type": "llama3", "type": "llama3"},
                "tie_word_embeddings": False, "pad_token_id": 3},
    "DeepSeek-V3": {"model_type": "deepseek_v3", "attention_bias": False, "attention_dropout": 0.0,
                    "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 1, "kv_lora_rank": 10,
                    "moe_intermediate_size": 24, "moe_layer_freq": 1, "n_group": 4, "n_routed_experts": 8,
                    "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 3,
                    "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 14, "qk_nope_head_dim": 6,
                    "qk_rope_head_dim": 4, "rms_norm_eps": 1e-6, "rope_theta": 10000, "routed_scaling_factor": 2.5,
                    "scoring_func": "sigmoid", "seq_aux": True, "topk_group": 2, "topk_method": "noaux_tc",
                    "v_head_dim": 8, "num_key_value_heads": 4, "tie_word_embeddings": False,
                    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                                     "mscale_all_dim": 1.0, "original_max_position_embeddings": 32, "type": "yarn"}},
    "Kimi K2": {"model_type": "deepseek_v3", "attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1,
                "first_k_dense_replace": 1, "kv_lora_rank": 10, "moe_intermediate_size": 24, "moe_layer_freq": 1,
                "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": True,
                "num_experts_per_tok": 3, "num_nextn_predict_layers": 0, "pretraining_tp": 1, "q_lora_rank": 14,
                "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "rms_norm_eps": 1e-6, "rope_theta": 50000.0,
                "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True, "topk_group": 1,
                "topk_method": "noaux_tc", "v_head_dim": 8, "num_key_value_heads": 4,
                "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0,
                                 "mscale_all_dim": 1.0, "original_max_position_embeddings": 32, "type": "yarn"}},
    "DeepSeek-V2 Lite": {"model_type": "deepseek_v2", "attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1,
                         "first_k_dense_replace": 1, "kv_lora_rank": 10, "moe_intermediate_size": 24,
                         "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 2,
                         "norm_topk_prob": False, "num_experts_per_tok": 3, "q_lora_rank": None,
                         "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "rms_norm_eps": 1e-6, "rope_theta": 10000,
                         "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True, "topk_group": 1,
                         "topk_method": "greedy", "v_head_dim": 8, "num_key_value_heads": 4,
                         "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
                                          "mscale_all_dim": 0.707, "original_max_position_embeddings": 32,
                                          "type": "yarn"}},
    "gpt-oss": {"model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0, "experts_per_token": 2,
                "head_dim": 8, "hidden_act": "silu", "initial_context_length": 32, "num_experts_per_tok": 2,
                "layer_types": ["sliding_attention", "full_attention"] * 2, "num_local_experts": 4,
                "output_router_logits": False, "pad_token_id": 3, "rms_norm_eps": 1e-5, "rope_theta": 150000,
                "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                                 "original_max_position_embeddings": 32, "truncate": False},
                "router_aux_loss_coef": 0.9, "sliding_window": 16, "swiglu_limit": 7.0, "tie_word_embeddings": False},
    "Granite 4 H": {"model_type": "granitemoehybrid", "attention_bias": False, "attention_dropout": 0.0,
                    "attention_multiplier": 0.125, "embedding_multiplier": 12, "hidden_act": "silu",
                    "init_method": "mup", "layer_types": ["mamba", "attention"] * 2, "logits_scaling": 6,
                    "mamba_chunk_size": 16, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 16,
                    "mamba_d_state": 8, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 4,
                    "mamba_proj_bias": False, "normalization_function": "rmsnorm", "num_experts_per_tok": 2,
                    "num_local_experts": 4, "output_router_logits": False, "pad_token_id": 3,
                    "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-5,
                    "rope_scaling": None, "rope_theta": 10000, "router_aux_loss_coef": 0.01,
                    "shared_intermediate_size": 40, "tie_word_embeddings": True},
    "Qwen3.5": {"model_type": "qwen3_5_text", **QWEN35, "mlp_only_layers": []},
    "Qwen3.5 A3B": {"model_type": "qwen3_5_moe_text", **QWEN35, "moe_intermediate_size": 24, "num_experts": 4,
                    "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.001,
                    "shared_expert_intermediate_size": 24},
    "MiniCPM3": {"model_type": "minicpm3", "attention_bias": False, "attention_dropout": 0.0, "dim_model_base": 16,
                 "kv_lora_rank": 10, "q_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 6,
                 "rms_norm_eps": 1e-5, "scale_depth": 1.4, "scale_emb": 12, "num_key_value_heads": 4,
                 "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 2.0, 9],
                                  "original_max_position_embeddings": 64}},
}  # fmt: skip
"""The fields of published config.json files as transformers 4 wrote them, with the sizes of a tiny model."""
QUICK = ("Phi-4-mini", "SmolLM3", "Granite 3", "Command R7B", "GLM-4", "Apertus", "Kimi K2")
"""Those that are compared in every run of the tests; the others among the slow ones."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PUBLISHED]
)
def test_a_published_file_computes_what_transformers_computes(tmp_path: Path, name: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    raw = {**_SIZES, **PUBLISHED[name]}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**raw)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape) * (parameter.ndim == 1))
    model.save_pretrained(tmp_path)
    raw["architectures"] = [type(model).__name__]
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    ids = np.random.default_rng(0).integers(0, 67, (2, 48))
    config, vocab_size = hf.config_from_hf(raw)
    _, tensors = read(tmp_path)
    config = config.fit_to_files(tensors.keys())
    actual = our_logits(config, vocab_size, tensors, ids)
    assert np.abs(actual - torch_logits(tmp_path, ids)).max() <= 1e-4
    written = hf.config_to_hf(config, vocab_size=vocab_size, eos_id=2, bos_id=1)
    assert hf.config_from_hf(written) == (config, vocab_size)


def edited(directory: Path, out: Path, changes: dict[str, Any]) -> Path:
    """A copy of a checkpoint with another config.json."""
    shutil.copytree(directory, out)
    raw = json.loads((directory / "config.json").read_text(encoding="utf-8")) | changes
    config = {key: value for key, value in raw.items() if value is not GONE}
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return out


def torch_logits(directory: Path, ids: np.ndarray) -> np.ndarray:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").float().eval()
    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits.numpy()


@pytest.mark.parametrize(("name", "changes"), OLD_CONFIGS)
def test_an_old_file_computes_what_transformers_computes(
    make_hf_model: Any, tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    directory = edited(build(make_hf_model, name), tmp_path / "old", changes)
    raw, tensors = read(directory)
    ids = np.load(directory / "reference.npz")["input_ids"]
    actual = our_logits(*hf.config_from_hf(raw), tensors, ids)
    assert np.abs(actual - torch_logits(directory, ids)).max() <= 1e-4


def test_a_gate_that_transformers_reads_otherwise_is_not_written(make_hf_model: Any) -> None:
    raw, _ = read(build(make_hf_model, "gemma"))
    config, vocab_size = hf.config_from_hf(raw)
    with pytest.raises(UserError, match="takes hidden_act: gelu of a gemma model for its tanh approximation"):
        hf.config_to_hf(change(config, activation_function="gelu"), vocab_size=vocab_size, eos_id=2, bos_id=1)


@pytest.mark.slow
def test_longrope_takes_the_table_of_the_models_seq_len(make_hf_model: Any) -> None:
    directory = build(make_hf_model, "phi3", rope_parameters=LONG, original_max_position_embeddings=32)
    raw, tensors = read(directory)
    config, vocab_size = hf.config_from_hf(raw)
    ids = np.load(directory / "reference.npz")["input_ids"]
    for seq_len, length in {32: 32, 64: 48}.items():
        actual = our_logits(change(config, seq_len=seq_len), vocab_size, tensors, ids[:, :length])
        assert np.abs(actual - torch_logits(directory, ids[:, :length])).max() <= 1e-4, seq_len
    # On the other side transformers takes the other table, which is said.
    other = our_logits(config, vocab_size, tensors, ids[:, :32])
    assert np.abs(other - torch_logits(directory, ids[:, :32])).max() > 1e-2
    assert "seq_len is 64, so rotary positions are scaled by long_factor" in str(config.describe_difference_from_hf())
    assert change(config, seq_len=32).describe_difference_from_hf() is None


@pytest.mark.parametrize(
    ("name", "key"), [("llama", "num_attention_heads"), ("qwen2", "max_window_layers"), ("llama", "rope_theta")]
)
def test_null_is_the_default_as_an_absent_key_is(make_hf_model: Any, name: str, key: str) -> None:
    raw, _ = read(build(make_hf_model, name))
    kinds = ["full_attention"] * raw["num_hidden_layers"]
    absent = without({**raw, "layer_types": kinds, "rope_parameters": without(raw["rope_parameters"], key)}, key)
    null = {**absent, key: None, "rope_parameters": {"rope_theta": None, **absent["rope_parameters"]}}
    assert hf.config_from_hf(null) == hf.config_from_hf(absent)


def test_activations_without_a_counterpart_are_refused(make_hf_model: Any) -> None:
    raw, _ = read(build(make_hf_model, "llama"))
    for name in ("mish", "gelu_10"):
        with pytest.raises(UserError, match=r"config\.json: hidden_act: Input should be 'gelu', 'gelu_new', 'relu'"):
            hf.config_from_hf({**raw, "hidden_act": name})


@pytest.mark.parametrize(
    ("block", "method"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8"),
    ],
)
def test_quantized_weights_are_refused(make_hf_model: Any, tmp_path: Path, block: dict[str, Any], method: str) -> None:
    plain = build(make_hf_model, "llama")
    assert read_hf_config(edited(plain, tmp_path / "none", {"quantization_config": None})) == read_hf_config(plain)
    with pytest.raises(UserError, match=rf"config\.json: .*quantized with {method}, which is not read; use the model"):
        read_hf_config(edited(plain, tmp_path / "quantized", {"quantization_config": block}))
