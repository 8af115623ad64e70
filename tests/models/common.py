"""One tiny configuration per family; what is tested over all families runs on these."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lm_trainer.models import (
    AnyModel,
    ApertusConfig,
    ArceeConfig,
    BackpackConfig,
    Cohere2Config,
    DecoderConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    Gemma4Config,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Gpt2Config,
    GptNeoxConfig,
    GptOssConfig,
    Granite4Config,
    GraniteConfig,
    Llama4Config,
    LlamaConfig,
    Mamba2Config,
    MiniCpm3Config,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    NanochatConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen35Config,
    Qwen35MoeConfig,
    SeedOssConfig,
    SmolLm3Config,
    StarCoder2Config,
)
from lm_trainer.models.rope import Llama3Rope, YarnRope
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.spec import DecoderSpec
from tests.compiling import quick_jit

VOCAB, SEQ = 61, 16

C = TypeVar("C", bound=DecoderConfig)

SMALL: dict[str, Any] = {
    "seq_len": SEQ,
    "hidden_dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "initializer_range": 0.1,
    "gradient_checkpointing": False,
    "scan_layers": False,
}
ROTARY = {**SMALL, "intermediate_dim": 48, "num_kv_heads": 2}

LATENT: dict[str, Any] = {
    **SMALL,
    "intermediate_dim": 48,
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "mscale_all_dim": 0.5,
    "rope": YarnRope(factor=4.0),
}

DELTA: dict[str, Any] = {
    "head_dim": 12,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
}
TINY: dict[str, AnyModel] = {
    "gpt2": Gpt2Config(
        seq_len=SEQ,
        hidden_dim=32,
        num_layers=3,
        num_heads=4,
        initializer_range=0.1,
        gradient_checkpointing=False,
        scale_attn_by_inverse_layer_idx=True,
    ),
    "llama": LlamaConfig(**{**ROTARY, "num_layers": 3}, rope=Llama3Rope(original_max_position_embeddings=8)),
    "mistral": MistralConfig(**ROTARY, sliding_window=4, head_dim=12),
    "qwen2": Qwen2Config(**ROTARY, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": Qwen3Config(**ROTARY, head_dim=12, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "olmo2": Olmo2Config(**ROTARY),
    "olmo3": Olmo3Config(**ROTARY, sliding_window=4, sliding_window_pattern=2, rope=YarnRope(factor=4.0)),
    "gemma": GemmaConfig(**{**ROTARY, "num_kv_heads": 1}, head_dim=12),
    "gemma2": Gemma2Config(**ROTARY, head_dim=12, sliding_window=4, attn_logit_softcapping=2.0),
    "gemma3": Gemma3Config(**{**ROTARY, "num_layers": 3}, head_dim=12, sliding_window=4, sliding_window_pattern=2),
    "phi3": Phi3Config(**ROTARY, partial_rotary_factor=0.5),
    "gpt_neox": GptNeoxConfig(**SMALL, intermediate_dim=48),
    "mixtral": MixtralConfig(**ROTARY, n_routed_experts=3),
    "qwen3_moe": Qwen3MoeConfig(
        **{**ROTARY, "num_layers": 3},
        head_dim=12,
        moe_intermediate_dim=20,
        n_routed_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=(0,),
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **{**ROTARY, "num_layers": 3},
        moe_intermediate_dim=20,
        shared_intermediate_dim=28,
        n_routed_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=(2,),
    ),
    "olmoe": OlmoeConfig(**ROTARY, n_routed_experts=4, num_experts_per_tok=2, clip_qkv=0.5),
    "glm4_moe": Glm4MoeConfig(
        **{**ROTARY, "num_layers": 3},
        head_dim=12,
        partial_rotary_factor=0.5,
        use_qk_norm=True,
        moe_intermediate_dim=20,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.5,
        lbl_coef=0.01,
        mtp_depth=1,
        mtp_loss_weight=0.02,
    ),
    "gpt_oss": GptOssConfig(
        **ROTARY,
        head_dim=12,
        sliding_window=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        swiglu_limit=0.5,
        rope=YarnRope(factor=4.0, truncate=False),
    ),
    "llama4": Llama4Config(
        **{**ROTARY, "num_layers": 4},
        head_dim=12,
        no_rope_layer_interval=2,
        attention_chunk_size=5,
        floor_scale=4,
        moe_intermediate_dim=20,
        n_routed_experts=4,
        num_experts_per_tok=2,
        interleave_moe_layer_step=2,
    ),
    "granite4": Granite4Config(
        **{**ROTARY, "num_layers": 3},
        attention_layers=(1,),
        use_rope=True,
        shared_intermediate_dim=28,
        mamba_num_heads=4,
        mamba_head_dim=16,
        mamba_state_dim=8,
        mamba_num_groups=2,
        mamba_chunk_size=5,
        n_routed_experts=4,
        num_experts_per_tok=2,
        embedding_multiplier=3.0,
        attention_multiplier=0.5,
        residual_multiplier=0.75,
        logits_scaling=1.5,
    ),
    "mpt": MptConfig(**SMALL, clip_qkv=0.5),
    "backpack": BackpackConfig(**SMALL, num_senses=4, sense_intermediate_scale=1),
    "smollm3": SmolLm3Config(**{**ROTARY, "num_layers": 3}, no_rope_layer_interval=2, sliding_window=4),
    "granite": GraniteConfig(
        **ROTARY, embedding_multiplier=3.0, attention_multiplier=0.5, residual_multiplier=0.75, logits_scaling=1.5
    ),
    "cohere2": Cohere2Config(**{**ROTARY, "num_layers": 3}, head_dim=12, sliding_window=4, sliding_window_pattern=2),
    "starcoder2": StarCoder2Config(**ROTARY, sliding_window=4),
    "glm4": Glm4Config(**ROTARY, head_dim=12, partial_rotary_factor=0.5),
    "arcee": ArceeConfig(**ROTARY),
    "seed_oss": SeedOssConfig(**ROTARY, head_dim=12),
    "nanochat": NanochatConfig(**ROTARY, final_logit_softcapping=2.0),
    "deepseek_v3": DeepseekV3Config(
        **{**LATENT, "num_layers": 3},
        moe_intermediate_dim=20,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=3,
        topk_group=2,
        first_k_dense_replace=1,
        lbl_coef=0.01,
        mtp_depth=1,
        mtp_loss_weight=0.02,
    ),
    "deepseek_v2": DeepseekV2Config(
        **{**LATENT, "q_lora_rank": None, "num_layers": 3},
        moe_intermediate_dim=20,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.5,
    ),
    "qwen3_next": Qwen3NextConfig(
        **{**ROTARY, "num_layers": 3},
        **DELTA,
        moe_intermediate_dim=20,
        shared_intermediate_dim=28,
        n_routed_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=(2,),
    ),
    "qwen3_5": Qwen35Config(**{**ROTARY, "num_layers": 3}, **DELTA),
    "qwen3_5_moe": Qwen35MoeConfig(
        **{**ROTARY, "num_layers": 3}, **DELTA, shared_intermediate_dim=28, n_routed_experts=5, num_experts_per_tok=2
    ),
    "minicpm3": MiniCpm3Config(
        **LATENT,
    ),
    "mamba2": Mamba2Config(**SMALL, head_dim=16, state_dim=8, num_groups=2, chunk_size=5),
    "apertus": ApertusConfig(**ROTARY, rope=Llama3Rope(original_max_position_embeddings=8)),
    "gemma4": Gemma4Config(
        **{**ROTARY, "num_layers": 3},
        head_dim=12,
        global_head_dim=16,
        num_global_kv_heads=1,
        partial_rotary_factor=0.5,
        sliding_window=4,
        sliding_window_pattern=2,
        final_logit_softcapping=2.0,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_dim=20,
        layer_embedding_dim=6,
        num_kv_shared_layers=1,
        use_double_wide_mlp=True,
    ),
}

WITHOUT_OWN_PARTS = ("mistral", "qwen2", "qwen3", "olmo2", "phi3", "smollm3", "starcoder2", "glm4", "seed_oss")
"""Families that combine parts of the others: where a test of all of them is expensive, the others stand for these."""


def parts(spec: Any, path: str = "") -> Iterator[str]:
    """Kinds of the modules of a model and its settings, numbers but for 0 and 1 without their value."""
    if dataclasses.is_dataclass(spec):
        yield f"{path}: {type(spec).__name__}"
        for field in dataclasses.fields(spec):
            yield from parts(getattr(spec, field.name), f"{path}.{field.name}")
    elif isinstance(spec, tuple):
        for value in spec:
            yield from parts(value, path)
    elif isinstance(spec, int | float) and not isinstance(spec, bool):
        yield f"{path}: {spec if spec in (0, 1) else 'number'}"
    else:
        yield f"{path}: {getattr(spec, '__name__', spec)}"


def graphdef(config: AnyModel) -> nnx.GraphDef[Decoder]:
    return nnx.split(nnx.eval_shape(lambda: config.build(VOCAB, rngs=nnx.Rngs(0))), nnx.Param)[0]


def params(config: AnyModel) -> dict[str, Any]:
    """Fresh parameters, made under jit."""
    return _params(config.module(), config.spec(VOCAB))


@functools.cache
def _params(module: type[Decoder], spec: DecoderSpec) -> dict[str, Any]:
    return quick_jit(lambda: nnx.to_pure_dict(nnx.state(module(spec, rngs=nnx.Rngs(0)), nnx.Param)))()


def disturbed(weights: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """With random norms and biases in place of ones and zeros."""
    rng = np.random.default_rng(seed)

    def disturb(path: Any, leaf: jax.Array) -> Any:
        if path[-1].key not in ("bias", "scale"):
            return leaf
        return jnp.asarray(np.asarray(leaf) + 0.2 * rng.standard_normal(leaf.shape, np.float32))

    return jax.tree_util.tree_map_with_path(disturb, weights)


def change(config: C, **fields: Any) -> C:
    return type(config).model_validate({**config.model_dump(), **fields})


def tokens(rows: int = 2, length: int = SEQ, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, length)).astype(np.int32)


def positions(rows: int = 2, length: int = SEQ) -> np.ndarray:
    return np.tile(np.arange(length, dtype=np.int32), (rows, 1))
