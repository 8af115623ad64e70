"""Writes transformers4.json: config.json files of every family as transformers 4 saves them.

python -m venv old && old/bin/pip install "transformers==4.57.6"
old/bin/python tests/models/golden/make_transformers4.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LINEAR = {"type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"vocab_size": 67, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "llama": ("Llama", {**SIZES, "rope_theta": 20000.0}),
    "llama defaults": ("Llama", {}),
    "llama linear": ("Llama", {**SIZES, "rope_scaling": dict(LINEAR)}),
    "llama llama3": ("Llama", {**SIZES, "rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "llama yarn": ("Llama", {**SIZES, "rope_scaling": YARN}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 16, "rope_theta": 1e6}),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4, "rope_theta": 1e6}),
    "qwen2": ("Qwen2", {**SIZES, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 12, "rope_theta": 1e6, "rope_scaling": YARN}),
    "qwen3_moe": ("Qwen3Moe", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "qwen2_moe": ("Qwen2Moe", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                               "shared_expert_intermediate_size": 40, "rope_theta": 1e6}),
    "olmoe": ("Olmoe", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.5}),
    "glm4_moe": ("Glm4Moe", {**SIZES, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                             "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5, "rope_theta": 1e6}),
    "deepseek_v3": ("DeepseekV3", {**SIZES, "num_key_value_heads": 4, "kv_lora_rank": 10, "q_lora_rank": 14,
                                   "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
                                   "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek_v2": ("DeepseekV2", {**SIZES, "num_key_value_heads": 4, "kv_lora_rank": 10, "q_lora_rank": None,
                                   "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1}),
    "qwen3_next": ("Qwen3Next", {**SIZES, "head_dim": 12, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
                                 "linear_key_head_dim": 6, "linear_value_head_dim": 8, "num_experts": 4,
                                 "num_experts_per_tok": 2, "moe_intermediate_size": 24, "rope_theta": 1e7}),
    "mamba2": ("Mamba2", {"vocab_size": 67, "hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8,
                          "n_groups": 2, "num_hidden_layers": 4}),
    "gpt_oss": ("GptOss", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12,
                           "sliding_window": 16, "rope_theta": 150000.0, "rope_scaling": {**YARN, "truncate": False}}),
    "gpt_oss defaults": ("GptOss", {}),
    "granitemoehybrid": ("GraniteMoeHybrid", {**SIZES, "layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 4,
                                              "num_local_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8,
                                              "shared_intermediate_size": 40, "position_embedding_type": "nope"}),
    "llama4_text": ("Llama4Text", {**SIZES, "num_local_experts": 4, "head_dim": 12, "intermediate_size_mlp": 40,
                                   "interleave_moe_layer_step": 2, "attention_chunk_size": 16, "floor_scale": 8,
                                   "rope_scaling": LLAMA3}),
    "olmo2": ("Olmo2", {**SIZES, "rope_theta": 500000.0}),
    "olmo3": ("Olmo3", {**SIZES, "sliding_window": 16, "rope_theta": 500000.0, "rope_scaling": YARN}),
    "gemma": ("Gemma", {**SIZES, "num_key_value_heads": 1, "head_dim": 12}),
    "gemma2": ("Gemma2", {**SIZES, "head_dim": 12, "sliding_window": 16, "query_pre_attn_scalar": 12}),
    "gemma3": ("Gemma3Text", {**SIZES, "num_hidden_layers": 7, "head_dim": 12, "sliding_window": 16,
                              "rope_theta": 1e6, "rope_local_base_freq": 2e4,
                              "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "phi3": ("Phi3", {**SIZES, "sliding_window": 16, "partial_rotary_factor": 0.5, "rope_theta": 20000.0}),
    "phi3 mini": ("Phi3", {**SIZES, "sliding_window": 256, "partial_rotary_factor": 0.75,
                           "original_max_position_embeddings": 32, "tie_word_embeddings": True,
                           "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.3],
                                            "long_factor": [1.0, 2.0, 4.0]}}),
    "smollm3": ("SmolLM3", {**SIZES, "no_rope_layer_interval": 2, "rope_theta": 5e6}),
    "smollm3 window": ("SmolLM3", {**SIZES, "no_rope_layers": [1, 1, 0, 1], "use_sliding_window": True,
                                   "sliding_window": 16}),
    "granite": ("Granite", {**SIZES, "embedding_multiplier": 12.0, "attention_multiplier": 0.125,
                            "residual_multiplier": 0.22, "logits_scaling": 8.0, "rope_theta": 1e6}),
    "cohere2": ("Cohere2", {**SIZES, "sliding_window": 16, "sliding_window_pattern": 3, "rope_theta": 5e4,
                            "logit_scale": 0.25}),
    "starcoder2": ("Starcoder2", {**SIZES, "sliding_window": 16, "rope_theta": 1e6, "residual_dropout": 0.1}),
    "glm4": ("Glm4", {**SIZES, "head_dim": 16, "rope_theta": 2e4}),
    "apertus": ("Apertus", SIZES),
    "arcee": ("Arcee", {**SIZES, "head_dim": 12, "rope_scaling": YARN}),
    "seed_oss": ("SeedOss", {**SIZES, "head_dim": 16, "rope_theta": 1e7}),
    "gpt_neox": ("GPTNeoX", {**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"},
                             "rotary_pct": 0.5, "rotary_emb_base": 20000}),
    "mpt": ("Mpt", {"vocab_size": 67, "d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 64,
                    "attn_config": {"clip_qkv": 0.5}}),
}  # fmt: skip


def saved(family: str, settings: dict[str, Any]) -> dict[str, Any]:
    import transformers

    config = getattr(transformers, f"{family}Config")(**settings)
    config.dtype = "bfloat16"
    with tempfile.TemporaryDirectory() as out:
        config.save_pretrained(out)
        written = json.loads((Path(out) / "config.json").read_text())
    # 4.57 is the first to write `dtype`.
    written["torch_dtype"] = written.pop("dtype")
    return written


def main() -> None:
    cases = {name: saved(*case) for name, case in CASES.items()}
    # Before 4.43 the kind of scaling was `type` alone.
    cases["llama linear"]["rope_scaling"] = LINEAR
    lines = [f"{json.dumps(name)}: {json.dumps(case, sort_keys=True)}" for name, case in cases.items()]
    Path(__file__).with_name("transformers4.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
