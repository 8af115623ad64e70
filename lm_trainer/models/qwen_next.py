"""Qwen3-Next (Qwen team 2025): Gated DeltaNet in three of four layers, gated attention in the others, zero-centred
norms, and a mixture of many small experts.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lm_trainer.models.delta_hybrid import (
    DELTA,
    DELTA_FIELDS,
    MULTI_TOKEN,
    DeltaHybridConfig,
    hybrid_from_hf,
    hybrid_tensors,
    hybrid_to_hf,
)
from lm_trainer.models.experts import GroupedExpertsConfig, expert_tensors, shared_expert_tensors
from lm_trainer.models.hf_table import HfFamily, HfField, linear_tensors
from lm_trainer.models.qwen_moe import check_layers_exist, dense_layers
from lm_trainer.models.rotary import BLOCK, HEAD, LAYER, MLP, TIED, hf_fields_of_one_activation
from lm_trainer.nn.expert_spec import RouterSpec, SharedExpertSpec
from lm_trainer.nn.spec import BlockSpec, DecoderSpec


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"mlp_only_layers": tuple(hf.get("mlp_only_layers") or ()), **hybrid_from_hf(hf, kv_heads=2)}


def _to_hf(config: "Qwen3NextConfig") -> dict[str, Any]:
    return {"mlp_only_layers": list(config.mlp_only_layers), **hybrid_to_hf(config)}


class Qwen3NextConfig(DeltaHybridConfig, GroupedExpertsConfig):
    """The Qwen3-Next family; the defaults are Qwen3-Next 80B A3B."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="qwen3_next",
        reference="Qwen/Qwen3-Next-80B-A3B-Instruct",
        architecture="Qwen3NextForCausalLM",
        fields=(
            *hf_fields_of_one_activation(
                hidden_size=2048,
                intermediate_size=5632,
                num_hidden_layers=48,
                num_attention_heads=16,
                max_position_embeddings=32768,
            ),
            *DELTA_FIELDS,
            HfField("num_experts", "n_routed_experts", 512, old_names=("num_local_experts",)),
            HfField("num_experts_per_tok", "num_experts_per_tok", 10),
            HfField("moe_intermediate_size", "moe_intermediate_dim", 512),
            HfField("shared_expert_intermediate_size", "shared_intermediate_dim", 512),
            HfField("norm_topk_prob", "norm_topk_prob", True),
            HfField("decoder_sparse_step", "decoder_sparse_step", 1),
            HfField("router_aux_loss_coef", "lbl_coef", 0.001),
        ),
        tensors=(
            *hybrid_tensors(
                *linear_tensors(f"{DELTA}.in_proj_qkvz", f"{BLOCK}.attention.qkvz"),
                *linear_tensors(f"{DELTA}.in_proj_ba", f"{BLOCK}.attention.ba"),
            ),
            *MLP,
            *expert_tensors(f"{LAYER}.mlp.gate", f"{LAYER}.mlp.experts"),
            *shared_expert_tensors(f"{LAYER}.mlp.shared_expert", f"{LAYER}.mlp.shared_expert_gate"),
        ),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        # The activation of the convolutions and gates too, so no other one is supported.
        fixed={"attention_bias": False, "hidden_act": "silu"},
        inert={"attention_dropout": 0.0},
        computed_from_hf=_from_hf,
        computed_to_hf=_to_hf,
        ignored=MULTI_TOKEN,
        tied=TIED,
    )

    type: Literal["qwen3_next"] = "qwen3_next"
    """Name of the model family."""
    seq_len: int = Field(default=32768, gt=0)
    """Maximum sequence length in tokens."""
    num_layers: int = Field(default=48, gt=0)
    """Number of blocks."""
    hidden_dim: int = Field(default=2048, gt=0)
    """Width of the residual stream."""
    intermediate_dim: int = Field(default=5632, gt=0)
    """Width of the MLP of layers without experts."""
    num_heads: int = Field(default=16, gt=0)
    """Number of query heads of layers with attention."""
    num_kv_heads: int = Field(default=2, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads."""
    head_dim: int | None = Field(default=256, gt=0, multiple_of=2)
    """Number of dimensions per head. Unset: hidden_dim / num_heads."""
    moe_intermediate_dim: int = Field(default=512, gt=0)
    """Width of each expert."""
    shared_intermediate_dim: int = Field(default=512, gt=0)
    """Width of the expert that processes every token."""
    n_routed_experts: int = Field(default=512, gt=0)
    num_experts_per_tok: int = Field(default=10, gt=0)
    norm_topk_prob: bool = True
    """Normalizes the weights of a token's experts to sum to 1."""
    decoder_sparse_step: int = Field(default=1, gt=0)
    """Every n-th layer has experts. The other layers have a plain MLP."""
    mlp_only_layers: tuple[int, ...] = ()
    """Indices of layers, counted from 0, that always have a plain MLP."""

    @model_validator(mode="after")
    def _check_layers_exist(self) -> "Qwen3NextConfig":
        check_layers_exist(self.mlp_only_layers, self.num_layers)
        return self

    def spec(self, vocab_size: int) -> DecoderSpec:
        shared = SharedExpertSpec(self.shared_intermediate_dim, gated=True)
        router = RouterSpec(renormalize=self.norm_topk_prob)
        experts = self.moe_spec(self.moe_intermediate_dim, router=router, shared=shared)
        dense = dense_layers(self.num_layers, self.decoder_sparse_step, self.mlp_only_layers)
        blocks = tuple(
            BlockSpec(mixer, self.mlp_spec() if is_dense else experts, pre_norm=self.norm_spec())
            for mixer, is_dense in zip(self.mixers(), dense, strict=True)
        )
        return self.decoder_spec(vocab_size, blocks)
