"""Qwen2 with experts (Yang et al. 2024): many small experts, and a gated expert that all tokens pass."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lm_trainer.models.experts import GroupedExpertsConfig, expert_tensors, shared_expert_tensors
from lm_trainer.models.hf_table import HfFamily, HfField
from lm_trainer.models.qwen_moe import check_layers_exist, dense_layers
from lm_trainer.models.rope import rope_from_hf
from lm_trainer.models.rotary import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    LAYER,
    MLP,
    PRE_NORMS,
    TIED,
    common_fields_to_hf,
    heads_from_hf,
    hf_fields,
)
from lm_trainer.nn.expert_spec import RouterSpec, SharedExpertSpec
from lm_trainer.nn.spec import BlockSpec, DecoderSpec


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    if "sliding_attention" in (hf.get("layer_types") or ()):
        raise ValueError("layer_types is not supported where a layer has sliding_attention")
    return {
        "mlp_only_layers": tuple(hf.get("mlp_only_layers") or ()),
        "rope": rope_from_hf(hf),
        **heads_from_hf(hf, kv_heads=16),
    }


def _to_hf(config: "Qwen2MoeConfig") -> dict[str, Any]:
    return {"mlp_only_layers": list(config.mlp_only_layers), **common_fields_to_hf(config)}


class Qwen2MoeConfig(GroupedExpertsConfig):
    """The Qwen2 family with experts; the defaults are Qwen1.5 MoE A2.7B."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="qwen2_moe",
        reference="Qwen/Qwen1.5-MoE-A2.7B",
        architecture="Qwen2MoeForCausalLM",
        fields=(
            *hf_fields(
                hidden_size=2048,
                intermediate_size=5632,
                num_hidden_layers=24,
                num_attention_heads=16,
                max_position_embeddings=32768,
            ),
            HfField("qkv_bias", "use_bias", True),
            HfField("num_experts", "n_routed_experts", 60, old_names=("num_local_experts",)),
            HfField("num_experts_per_tok", "num_experts_per_tok", 4),
            HfField("moe_intermediate_size", "moe_intermediate_dim", 1408),
            HfField("shared_expert_intermediate_size", "shared_intermediate_dim", 5632),
            HfField("norm_topk_prob", "norm_topk_prob", False),
            HfField("decoder_sparse_step", "decoder_sparse_step", 1),
            HfField("router_aux_loss_coef", "lbl_coef", 0.001),
        ),
        tensors=(
            *EMBEDDING,
            HEAD,
            *PRE_NORMS,
            *ATTENTION,
            *MLP,
            *expert_tensors(f"{LAYER}.mlp.gate", f"{LAYER}.mlp.experts"),
            *shared_expert_tensors(f"{LAYER}.mlp.shared_expert", f"{LAYER}.mlp.shared_expert_gate"),
        ),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed={"use_sliding_window": False},
        inert={"attention_dropout": 0.0},
        read_only=("layer_types", "sliding_window", "max_window_layers"),
        computed_from_hf=_from_hf,
        computed_to_hf=_to_hf,
        tied=TIED,
    )

    type: Literal["qwen2_moe"] = "qwen2_moe"
    """Name of the model family."""
    seq_len: int = Field(default=32768, gt=0)
    """Maximum sequence length in tokens."""
    hidden_dim: int = Field(default=2048, gt=0)
    """Width of the residual stream."""
    num_layers: int = Field(default=24, gt=0)
    """Number of blocks."""
    num_heads: int = Field(default=16, gt=0)
    """Number of query heads."""
    num_kv_heads: int = Field(default=16, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads."""
    use_bias: bool = True
    """Adds biases to queries, keys and values."""
    intermediate_dim: int = Field(default=5632, gt=0)
    """Width of the MLP of layers without experts."""
    moe_intermediate_dim: int = Field(default=1408, gt=0)
    """Width of each expert."""
    shared_intermediate_dim: int = Field(default=5632, gt=0)
    """Width of the expert that processes every token."""
    n_routed_experts: int = Field(default=60, gt=0)
    num_experts_per_tok: int = Field(default=4, gt=0)
    norm_topk_prob: bool = False
    """Normalizes the weights of a token's experts to sum to 1."""
    decoder_sparse_step: int = Field(default=1, gt=0)
    """Every n-th layer has experts. The other layers have a plain MLP."""
    mlp_only_layers: tuple[int, ...] = ()
    """Indices of layers, counted from 0, that always have a plain MLP."""

    @model_validator(mode="after")
    def _check_layers_exist(self) -> "Qwen2MoeConfig":
        check_layers_exist(self.mlp_only_layers, self.num_layers)
        return self

    def spec(self, vocab_size: int) -> DecoderSpec:
        attention = replace(self.attention_spec(), bias=self.use_bias)
        plain = BlockSpec(attention, self.mlp_spec(), pre_norm=self.norm_spec())
        router = RouterSpec(renormalize=self.norm_topk_prob)
        shared = SharedExpertSpec(self.shared_intermediate_dim, gated=True)
        sparse = replace(plain, mlp=self.moe_spec(self.moe_intermediate_dim, router=router, shared=shared))
        dense = dense_layers(self.num_layers, self.decoder_sparse_step, self.mlp_only_layers)
        return self.decoder_spec(vocab_size, tuple(plain if is_dense else sparse for is_dense in dense))
