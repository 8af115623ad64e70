"""Qwen3.5 (Qwen team 2026), the text models: Gated DeltaNet in three of four layers, gated attention in the others,
zero-centred norms, and either plain MLPs or a mixture of many small experts.
"""

from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

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
from lm_trainer.models.rotary import BLOCK, HEAD, LAYER, MLP, TIED, hf_fields_of_one_activation
from lm_trainer.nn.expert_spec import RouterSpec, SharedExpertSpec
from lm_trainer.nn.spec import BlockSpec, DecoderSpec

_TENSORS = hybrid_tensors(
    *linear_tensors(f"{DELTA}.in_proj_qkv", *(f"{BLOCK}.attention.{name}_in" for name in "qkv")),
    *linear_tensors(f"{DELTA}.in_proj_z", f"{BLOCK}.attention.z_in"),
    *linear_tensors(f"{DELTA}.in_proj_b", f"{BLOCK}.attention.b_in"),
    *linear_tensors(f"{DELTA}.in_proj_a", f"{BLOCK}.attention.a_in"),
)
# `attn_output_gate` is in published files; transformers itself does not read it.
_FIXED = {"attention_bias": False, "hidden_act": "silu", "attn_output_gate": True}
# Settings of the module that predicts several tokens, and the dtype of states in other programs.
_READ_ONLY = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")


def _expert_fields(**defaults: Any) -> tuple[HfField, ...]:
    """Returns the shared fields; `intermediate_dim` is the width of an expert, for which the file has another name."""
    fields = hf_fields_of_one_activation(intermediate_size=512, **defaults)
    name = "moe_intermediate_size"
    return tuple(replace(field, hf=name) if field.setting == "intermediate_dim" else field for field in fields)


class Qwen35Config(DeltaHybridConfig):
    """The Qwen3.5 family without experts; the defaults are Qwen3.5 27B."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        fields=(
            *hf_fields_of_one_activation(
                hidden_size=4096,
                intermediate_size=12288,
                num_hidden_layers=32,
                num_attention_heads=16,
                max_position_embeddings=32768,
            ),
            *DELTA_FIELDS,
        ),
        tensors=(*_TENSORS, *MLP),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed=_FIXED,
        inert={"attention_dropout": 0.0},
        read_only=_READ_ONLY,
        computed_from_hf=lambda hf: hybrid_from_hf(hf, kv_heads=4),
        computed_to_hf=hybrid_to_hf,
        ignored=MULTI_TOKEN,
        tied=TIED,
    )
    separate_maps: ClassVar[bool] = True

    type: Literal["qwen3_5"] = "qwen3_5"
    """Name of the model family."""
    seq_len: int = Field(default=262144, gt=0)
    """Maximum sequence length in tokens."""
    num_layers: int = Field(default=64, gt=0)
    """Number of blocks."""
    hidden_dim: int = Field(default=5120, gt=0)
    """Width of the residual stream."""
    intermediate_dim: int = Field(default=17408, gt=0)
    """Width of the MLP's hidden layer."""
    num_heads: int = Field(default=24, gt=0)
    """Number of query heads of layers with attention."""
    num_kv_heads: int = Field(default=4, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads."""
    head_dim: int | None = Field(default=256, gt=0, multiple_of=2)
    """Number of dimensions per head. Unset: hidden_dim / num_heads."""
    linear_num_value_heads: int = Field(default=48, gt=0)
    """Number of heads of values of Gated DeltaNet."""

    def spec(self, vocab_size: int) -> DecoderSpec:
        blocks = (BlockSpec(mixer, self.mlp_spec(), pre_norm=self.norm_spec()) for mixer in self.mixers())
        return self.decoder_spec(vocab_size, tuple(blocks))


class Qwen35MoeConfig(DeltaHybridConfig, GroupedExpertsConfig):
    """The Qwen3.5 family with experts in every layer; the defaults are Qwen3.5 35B A3B."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        fields=(
            *_expert_fields(
                hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, max_position_embeddings=32768
            ),
            *DELTA_FIELDS,
            HfField("num_experts", "n_routed_experts", 256, old_names=("num_local_experts",)),
            HfField("num_experts_per_tok", "num_experts_per_tok", 8),
            HfField("shared_expert_intermediate_size", "shared_intermediate_dim", 512),
            HfField("router_aux_loss_coef", "lbl_coef", 0.001),
        ),
        tensors=(
            *_TENSORS,
            *expert_tensors(f"{LAYER}.mlp.gate", f"{LAYER}.mlp.experts"),
            *shared_expert_tensors(f"{LAYER}.mlp.shared_expert", f"{LAYER}.mlp.shared_expert_gate"),
        ),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed=_FIXED,
        inert={"attention_dropout": 0.0},
        read_only=("intermediate_size", *_READ_ONLY),
        computed_from_hf=lambda hf: hybrid_from_hf(hf, kv_heads=2),
        computed_to_hf=hybrid_to_hf,
        ignored=MULTI_TOKEN,
        tied=TIED,
    )
    separate_maps: ClassVar[bool] = True

    type: Literal["qwen3_5_moe"] = "qwen3_5_moe"
    """Name of the model family."""
    seq_len: int = Field(default=262144, gt=0)
    """Maximum sequence length in tokens."""
    num_layers: int = Field(default=40, gt=0)
    """Number of blocks."""
    hidden_dim: int = Field(default=2048, gt=0)
    """Width of the residual stream."""
    intermediate_dim: int = Field(default=512, gt=0)
    """Width of each expert."""
    shared_intermediate_dim: int = Field(default=512, gt=0)
    """Width of the expert that processes every token."""
    num_heads: int = Field(default=16, gt=0)
    """Number of query heads of layers with attention."""
    num_kv_heads: int = Field(default=2, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads."""
    head_dim: int | None = Field(default=256, gt=0, multiple_of=2)
    """Number of dimensions per head. Unset: hidden_dim / num_heads."""
    n_routed_experts: int = Field(default=256, gt=0)
    num_experts_per_tok: int = Field(default=8, gt=0)

    def spec(self, vocab_size: int) -> DecoderSpec:
        shared = SharedExpertSpec(self.shared_intermediate_dim, gated=True)
        experts = self.moe_spec(self.intermediate_dim, router=RouterSpec(renormalize=True), shared=shared)
        blocks = (BlockSpec(mixer, experts, pre_norm=self.norm_spec()) for mixer in self.mixers())
        return self.decoder_spec(vocab_size, tuple(blocks))
