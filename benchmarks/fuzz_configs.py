"""Random legal configurations of model families, as `transformers` spells them, for `benchmarks.fuzz_families`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.fuzz_draw import LONGEST, PRETRAINED, VOCAB, Draw, Fields


def _rename(fields: Fields, old: str, new: str) -> Fields:
    """Returns the fields with another name for one of them."""
    return {new if name == old else name: value for name, value in fields.items()}


def _llama(draw: Draw) -> Fields:
    bias = draw.one(False, True)
    return {
        **draw.shared(), **draw.heads(), "rope_parameters": draw.rotary(), "attention_bias": bias, "mlp_bias": bias,
    }  # fmt: skip


def _mistral(draw: Draw) -> Fields:
    return {
        **draw.shared(), **draw.heads(), "rope_parameters": draw.rotary(),
        "sliding_window": draw.one(None, draw.window()),
    }  # fmt: skip


def _qwen(draw: Draw, *, sized: bool) -> Fields:
    shared = draw.shared()
    windows = {
        "use_sliding_window": True,
        "sliding_window": draw.window(),
        "max_window_layers": draw.one(*range(shared["num_hidden_layers"] + 1)),
    }
    rope = {"rope_parameters": draw.rotary()}
    return {**shared, **draw.heads(sized=sized), **rope, **draw.one({}, windows)}


def _qwen2(draw: Draw) -> Fields:
    return _qwen(draw, sized=False)


def _qwen3(draw: Draw) -> Fields:
    return _qwen(draw, sized=True)


def _olmo2(draw: Draw) -> Fields:
    return {**draw.shared(), **draw.heads(sized=False), "rope_parameters": draw.rotary()}


def _ropes(draw: Draw) -> Fields:
    return {"full_attention": draw.rotary(), "sliding_attention": draw.rotary(scaled=False)}


def _olmo3(draw: Draw) -> Fields:
    shared = draw.shared()
    return {
        **shared, **draw.heads(sized=False), "rope_parameters": _ropes(draw), "sliding_window": draw.window(),
        "layer_types": draw.pattern(shared["num_hidden_layers"], "sliding_attention"),
    }  # fmt: skip


def _gemma(draw: Draw) -> Fields:
    return {**draw.shared(), **draw.heads(), "rope_parameters": draw.rotary()}


def _gemma2(draw: Draw) -> Fields:
    fields = {**draw.shared(), **draw.heads(), "rope_parameters": draw.rotary()}
    return {
        **_rename(fields, "hidden_act", "hidden_activation"),
        "query_pre_attn_scalar": draw.one(4, 16, 100),
        "attn_logit_softcapping": draw.one(None, 1.0, 20.0),
        "final_logit_softcapping": draw.one(None, 1.0, 20.0),
        "sliding_window": draw.window(),
    }


def _gemma3(draw: Draw) -> Fields:
    fields = {**_gemma2(draw), "rope_parameters": _ropes(draw), "attn_logit_softcapping": None}
    return {**fields, "layer_types": draw.pattern(fields["num_hidden_layers"], "sliding_attention")}


def _gemma4(draw: Draw) -> Fields:
    fields = {**draw.shared(), **draw.heads()}
    layers, heads, shared_values = fields["num_hidden_layers"], fields["num_attention_heads"], draw.one(False, True)
    full = {
        "rope_type": "proportional",
        "rope_theta": draw.one(100.0, 1e4),
        "partial_rotary_factor": draw.one(0.25, 0.5, 1.0),
        **draw.one({}, {"factor": 4.0}),
    }
    experts = {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": draw.one(1, 2, 3),
        "moe_intermediate_size": draw.one(20, 40),
    }  # fmt: skip
    kinds = [*draw.pattern(layers, "sliding_attention")[:-1], "full_attention"]
    # A layer can use keys of an earlier layer of its kind.
    most_shared = max((shared for shared in range(layers) if {*kinds[: layers - shared]} == {*kinds}), default=0)
    shared = draw.one(*range(most_shared + 1))
    small = {
        "num_kv_shared_layers": shared, "use_double_wide_mlp": draw.one(False, True),
        # transformers needs embeddings of the layers where they share keys.
        "hidden_size_per_layer_input": 6 if shared else draw.one(0, 6),
        "vocab_size_per_layer_input": VOCAB,
    }  # fmt: skip
    return {
        **_rename(fields, "hidden_act", "hidden_activation"), **draw.one({}, experts), "sliding_window": draw.window(),
        "global_head_dim": draw.one(8, 12, 16), "attention_k_eq_v": shared_values,
        "num_global_key_value_heads": draw.one(None, *(n for n in range(1, heads + 1) if heads % n == 0)),
        "final_logit_softcapping": draw.one(None, 1.0, 30.0), "layer_types": kinds, **small,
        "rope_parameters": {"full_attention": full, "sliding_attention": draw.rotary(scaled=False)},
    }  # fmt: skip


def _phi3(draw: Draw) -> Fields:
    fields = {**draw.shared(), **draw.heads(sized=False)}
    head_dim = fields["hidden_size"] // fields["num_attention_heads"]
    fraction = draw.one(1.0, 0.5)
    pairs = int(head_dim * fraction) // 2
    long: Fields = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": draw.factors(pairs),
        "long_factor": draw.factors(pairs), "partial_rotary_factor": fraction,
        **draw.one({}, {"attention_factor": draw.between(0.5, 2.0)}),
    }  # fmt: skip
    # transformers has no other scaling for this family.
    rope = draw.one(long, draw.rotary(scaled=False, partial_rotary_factor=fraction))
    return {
        **fields, "rope_parameters": rope, "sliding_window": draw.one(None, draw.window()),
        "original_max_position_embeddings": draw.one(PRETRAINED, LONGEST),
    }  # fmt: skip


def _smollm3(draw: Draw) -> Fields:
    fields = {**draw.shared(), **draw.heads(sized=False), "rope_parameters": draw.rotary()}
    layers = fields["num_hidden_layers"]
    listed = draw.subset(layers)
    without_rope = draw.one(
        {"no_rope_layer_interval": draw.one(1, 2, 3, 4)},
        {"no_rope_layers": [int(layer not in listed) for layer in range(layers)]},
    )
    windows = {"use_sliding_window": True, "sliding_window": draw.window()}
    return {**fields, **without_rope, **draw.one({}, windows)}


def _granite(draw: Draw) -> Fields:
    return {
        **draw.shared(), **draw.heads(sized=False), "rope_parameters": draw.rotary(),
        "embedding_multiplier": draw.one(1.0, 3.0), "attention_multiplier": draw.one(1.0, 0.25),
        "residual_multiplier": draw.one(1.0, 0.7), "logits_scaling": draw.one(1.0, 1.5),
    }  # fmt: skip


def _cohere2(draw: Draw) -> Fields:
    fields = {**draw.shared(), **draw.heads(), "rope_parameters": draw.rotary()}
    return {
        **_rename(fields, "rms_norm_eps", "layer_norm_eps"), "sliding_window": draw.window(),
        "logit_scale": draw.one(0.0625, 0.5, 1.5),
        "layer_types": draw.pattern(fields["num_hidden_layers"], "sliding_attention"),
    }  # fmt: skip


def _starcoder2(draw: Draw) -> Fields:
    fields = {**draw.shared(), **draw.heads(sized=False), "rope_parameters": draw.rotary()}
    return {
        **_rename(fields, "rms_norm_eps", "norm_epsilon"), "use_bias": draw.one(False, True),
        "sliding_window": draw.one(None, draw.window()),
    }  # fmt: skip


def _glm4(draw: Draw) -> Fields:
    fields = {**draw.shared(), **draw.heads(), "head_dim": draw.one(8, 16), "attention_bias": draw.one(False, True)}
    return {**fields, "rope_parameters": draw.rotary(partial_rotary_factor=draw.one(0.5, 1.0))}


def _arcee(draw: Draw) -> Fields:
    fields = {**draw.shared(), **draw.heads(), "rope_parameters": draw.rotary()}
    return {**fields, "hidden_act": draw.one("relu2", fields["hidden_act"])}


def _seed_oss(draw: Draw) -> Fields:
    return {
        **draw.shared(), **draw.heads(), "rope_parameters": draw.rotary(),
        "attention_bias": draw.one(False, True), "attention_out_bias": draw.one(False, True),
    }  # fmt: skip


def _nanochat(draw: Draw) -> Fields:
    return {**_arcee(draw), "final_logit_softcapping": draw.one(None, 1.0, 15.0)}


def _apertus(draw: Draw) -> Fields:
    return {**draw.shared(), **draw.heads(), "rope_parameters": draw.rotary(), "hidden_act": draw.one("xielu", "relu")}


def _gpt_neox(draw: Draw) -> Fields:
    fields = {**draw.shared(), **draw.heads(sized=False, grouped=False)}
    fields["hidden_size"] = fields["num_attention_heads"] * draw.one(8, 16)
    return {
        **_rename(fields, "rms_norm_eps", "layer_norm_eps"), "attention_bias": draw.one(False, True),
        "use_parallel_residual": draw.one(False, True),
        "rope_parameters": draw.rotary(partial_rotary_factor=draw.one(0.25, 0.5, 1.0)),
    }  # fmt: skip


def _gpt2(draw: Draw) -> Fields:
    shared, heads = draw.shared(), draw.one(1, 2, 3, 4)
    width = heads * draw.one(4, 6, 8)
    return {
        "vocab_size": VOCAB, "n_embd": width, "n_head": heads, "n_layer": shared["num_hidden_layers"],
        "n_positions": LONGEST, "n_inner": draw.one(None, width, 3 * width), "initializer_range": 0.12,
        "activation_function": draw.one("gelu_new", "gelu", "relu", "silu"),
        "layer_norm_epsilon": shared["rms_norm_eps"], "scale_attn_by_inverse_layer_idx": draw.one(False, True),
        "reorder_and_upcast_attn": draw.one(False, True), "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def _mpt(draw: Draw) -> Fields:
    shared, heads = draw.shared(), draw.one(1, 2, 3, 6, 8)
    attention = {"clip_qkv": draw.one(None, 0.5), "softmax_scale": draw.one(None, 1.0)}
    return {
        "vocab_size": VOCAB, "d_model": heads * draw.one(4, 6, 8), "n_heads": heads, "max_seq_len": LONGEST,
        "n_layers": shared["num_hidden_layers"], "initializer_range": 0.12, "attn_config": attention,
        "layer_norm_epsilon": shared["rms_norm_eps"], "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def _mixtral(draw: Draw) -> Fields:
    experts = draw.one(2, 3, 4)
    return {
        **_mistral(draw), "num_local_experts": experts, "num_experts_per_tok": draw.one(*range(1, experts + 1)),
    }  # fmt: skip


def _qwen3_moe(draw: Draw) -> Fields:
    shared = draw.shared()
    return {
        **shared, **draw.heads(), **draw.experts(shared["num_hidden_layers"]), "rope_parameters": draw.rotary(),
    }  # fmt: skip


def _qwen2_moe(draw: Draw) -> Fields:
    shared = draw.shared()
    return {
        **shared, **draw.heads(sized=False), **draw.experts(shared["num_hidden_layers"]),
        "rope_parameters": draw.rotary(), "shared_expert_intermediate_size": draw.one(20, 40),
        "qkv_bias": draw.one(False, True),
    }  # fmt: skip


def _olmoe(draw: Draw) -> Fields:
    experts = draw.one(2, 4, 5)
    return {
        **_olmo2(draw), "num_experts": experts, "num_experts_per_tok": draw.one(*range(1, experts + 1)),
        "norm_topk_prob": draw.one(False, True), "clip_qkv": draw.one(None, 0.5),
    }  # fmt: skip


def _glm4_moe(draw: Draw) -> Fields:
    fields = _glm4(draw)
    return {
        **fields, **draw.grouped_experts(fields["num_hidden_layers"]), "norm_topk_prob": draw.one(False, True),
        "use_qk_norm": draw.one(False, True),
    }  # fmt: skip


def _deepseek_v3(draw: Draw) -> Fields:
    shared = draw.shared()
    return {
        **shared, **draw.latent(), **draw.grouped_experts(shared["num_hidden_layers"]),
        "norm_topk_prob": draw.one(False, True), "rope_interleave": draw.one(False, True),
    }  # fmt: skip


def _deepseek_v2(draw: Draw) -> Fields:
    fields = {**draw.shared(), **draw.latent()}
    return {
        **fields, **draw.grouped_experts(fields["num_hidden_layers"]),
        # transformers takes multiples of the number of heads alone, though its heads have a size of their own.
        "hidden_size": fields["num_attention_heads"] * draw.one(8, 12),
        "topk_method": draw.one("greedy", "group_limited_greedy"),
    }  # fmt: skip


def _minicpm3(draw: Draw) -> Fields:
    return {
        **draw.shared(), **draw.latent(), "scale_emb": draw.one(1.0, 3.0), "scale_depth": draw.one(1.0, 1.4),
        "dim_model_base": draw.one(8, 16),
    }  # fmt: skip


def _delta_hybrid(draw: Draw, num_layers: int) -> Fields:
    key_heads = draw.one(1, 2)
    return {
        "hidden_act": "silu", "head_dim": draw.one(8, 16),
        # With larger weights, float32 rounds by more than the tolerance.
        "initializer_range": 0.1,
        "rope_parameters": draw.rotary(partial_rotary_factor=draw.one(0.25, 0.5, 1.0)),
        "layer_types": draw.pattern(num_layers, "linear_attention"),
        "linear_num_key_heads": key_heads, "linear_num_value_heads": key_heads * draw.one(1, 2),
        "linear_key_head_dim": draw.one(6, 8), "linear_value_head_dim": draw.one(6, 10),
        "linear_conv_kernel_dim": draw.one(2, 3, 4),
    }  # fmt: skip


def _qwen3_next(draw: Draw) -> Fields:
    fields = _qwen3_moe(draw)
    shared = {"shared_expert_intermediate_size": draw.one(20, 40)}
    return {**fields, **_delta_hybrid(draw, fields["num_hidden_layers"]), **shared}


def _qwen3_5(draw: Draw) -> Fields:
    fields = {**draw.shared(), **draw.heads()}
    return {**fields, **_delta_hybrid(draw, fields["num_hidden_layers"])}


def _qwen3_5_moe(draw: Draw) -> Fields:
    absent = ("intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
    return {name: value for name, value in _qwen3_next(draw).items() if name not in absent}


def _gpt_oss(draw: Draw) -> Fields:
    shared, experts = draw.shared(), draw.one(2, 4, 5)
    return {
        **shared, **draw.heads(), "rope_parameters": draw.rotary(), "hidden_act": "silu",
        "num_local_experts": experts, "num_experts_per_tok": draw.one(*range(1, experts + 1)),
        "sliding_window": draw.window(), "attention_bias": draw.one(False, True),
        "layer_types": draw.pattern(shared["num_hidden_layers"], "sliding_attention"),
        "swiglu_alpha": draw.one(1.0, 1.702), "swiglu_limit": draw.one(0.5, 7.0),
    }  # fmt: skip


def _llama4(draw: Draw) -> Fields:
    shared, experts = draw.shared(), draw.one(2, 4, 5)
    layers = shared["num_hidden_layers"]
    rotated = [draw.one(0, 1) for _ in range(layers)]
    return {
        **shared, **draw.heads(), "rope_parameters": draw.rotary(), "hidden_act": "silu",
        "num_local_experts": experts, "num_experts_per_tok": draw.one(*range(1, experts + 1)),
        "intermediate_size_mlp": draw.one(20, 40), "attention_bias": draw.one(False, True),
        "use_qk_norm": draw.one(False, True), "attention_chunk_size": draw.window(),
        "attn_temperature_tuning": draw.one(False, True), "floor_scale": draw.one(3, 8),
        "attn_scale": draw.one(0.1, 0.5),
        **draw.one({"moe_layers": draw.subset(layers)}, {"interleave_moe_layer_step": draw.one(1, 2)}),
        **draw.one({"no_rope_layers": rotated if any(rotated) else None}, {"no_rope_layer_interval": draw.one(1, 2)}),
    }  # fmt: skip


def _granite4(draw: Draw) -> Fields:
    granite, mamba, experts = _granite(draw), _mamba2(draw), draw.one(0, 2, 4)
    layers = granite["num_hidden_layers"]
    attention = draw.subset(layers)
    heads = draw.one(2, 4)
    return {
        **granite, "initializer_range": 0.1, "hidden_act": "silu", "num_local_experts": experts,
        "num_experts_per_tok": draw.one(*range(1, experts + 1)) if experts else 0,
        "shared_intermediate_size": draw.one(20, 40), "position_embedding_type": draw.one(None, "rope"),
        "layer_types": ["attention" if layer in attention else "mamba" for layer in range(layers)],
        "mamba_n_heads": heads, "mamba_d_head": 2 * granite["hidden_size"] // heads,
        "mamba_n_groups": draw.one(1, 2), "mamba_d_state": mamba["state_size"], "mamba_d_conv": mamba["conv_kernel"],
        "mamba_chunk_size": mamba["chunk_size"], "mamba_conv_bias": mamba["use_conv_bias"],
        "mamba_proj_bias": mamba["use_bias"],
    }  # fmt: skip


def _mamba2(draw: Draw) -> Fields:
    shared, groups, head_dim = draw.shared(), draw.one(1, 2), draw.one(4, 8)
    heads = groups * draw.one(2, 4)
    names = ("vocab_size", "num_hidden_layers", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id",
             "tie_word_embeddings")  # fmt: skip
    return {
        **{name: shared[name] for name in names}, "hidden_size": heads * head_dim // 2, "num_heads": heads,
        "head_dim": head_dim, "state_size": draw.one(4, 6, 8), "n_groups": groups, "chunk_size": draw.one(8, 16),
        "conv_kernel": draw.one(2, 3, 4), "use_bias": draw.one(False, True), "use_conv_bias": draw.one(False, True),
        "layer_norm_epsilon": shared["rms_norm_eps"],
        **draw.one({}, {"time_step_limit": (draw.between(0.01, 0.3), draw.between(0.5, 0.9))}),
    }  # fmt: skip


class Family(NamedTuple):
    """Names of the classes of a family in transformers, and its random configurations."""

    config_class: str
    model_class: str
    draw: Callable[[Draw], Fields]


def _family(name: str, draw: Callable[[Draw], Fields]) -> Family:
    return Family(f"{name}Config", f"{name}ForCausalLM", draw)


FAMILIES: dict[str, Family] = {
    "llama": _family("Llama", _llama),
    "mistral": _family("Mistral", _mistral),
    "qwen2": _family("Qwen2", _qwen2),
    "qwen3": _family("Qwen3", _qwen3),
    "olmo2": _family("Olmo2", _olmo2),
    "olmo3": _family("Olmo3", _olmo3),
    "gemma": _family("Gemma", _gemma),
    "gemma2": _family("Gemma2", _gemma2),
    "gemma3": Family("Gemma3TextConfig", "Gemma3ForCausalLM", _gemma3),
    "phi3": _family("Phi3", _phi3),
    "smollm3": _family("SmolLM3", _smollm3),
    "granite": _family("Granite", _granite),
    "cohere2": _family("Cohere2", _cohere2),
    "starcoder2": _family("Starcoder2", _starcoder2),
    "glm4": _family("Glm4", _glm4),
    "arcee": _family("Arcee", _arcee),
    "seed_oss": _family("SeedOss", _seed_oss),
    "nanochat": _family("NanoChat", _nanochat),
    "apertus": _family("Apertus", _apertus),
    "gpt_neox": _family("GPTNeoX", _gpt_neox),
    "gpt2": Family("GPT2Config", "GPT2LMHeadModel", _gpt2),
    "mpt": _family("Mpt", _mpt),
    "mixtral": _family("Mixtral", _mixtral),
    "qwen3_moe": _family("Qwen3Moe", _qwen3_moe),
    "qwen2_moe": _family("Qwen2Moe", _qwen2_moe),
    "olmoe": _family("Olmoe", _olmoe),
    "glm4_moe": _family("Glm4Moe", _glm4_moe),
    "gpt_oss": _family("GptOss", _gpt_oss),
    "llama4": Family("Llama4TextConfig", "Llama4ForCausalLM", _llama4),
    "granite4": _family("GraniteMoeHybrid", _granite4),
    "gemma4": Family("Gemma4TextConfig", "Gemma4ForCausalLM", _gemma4),
    "deepseek_v3": _family("DeepseekV3", _deepseek_v3),
    "deepseek_v2": _family("DeepseekV2", _deepseek_v2),
    "minicpm3": _family("MiniCPM3", _minicpm3),
    "qwen3_next": _family("Qwen3Next", _qwen3_next),
    "qwen3_5": Family("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _qwen3_5),
    "qwen3_5_moe": Family("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _qwen3_5_moe),
    "mamba2": _family("Mamba2", _mamba2),
}
"""All text families that transformers has, by our name."""
