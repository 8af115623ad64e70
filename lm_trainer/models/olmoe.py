"""OLMoE (Muennighoff et al. 2024): many small experts instead of every MLP, and norms over all heads of queries and
keys.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from lm_trainer.models.experts import GroupedExpertsConfig, expert_tensors
from lm_trainer.models.hf_table import HfFamily, HfField
from lm_trainer.models.rope import rope_from_hf
from lm_trainer.models.rotary import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    LAYER,
    PRE_NORMS,
    QK_NORM,
    TIED,
    common_fields_to_hf,
    heads_from_hf,
    hf_fields,
)
from lm_trainer.nn.expert_spec import RouterSpec
from lm_trainer.nn.spec import BlockSpec, DecoderSpec, QkNormSpec


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope": rope_from_hf(hf), **heads_from_hf(hf, kv_heads=None)}


class OlmoeConfig(GroupedExpertsConfig):
    """The OLMoE family; the defaults are OLMoE 1B-7B."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="olmoe",
        reference="allenai/OLMoE-1B-7B-0924",
        architecture="OlmoeForCausalLM",
        fields=(
            *hf_fields(
                hidden_size=2048,
                intermediate_size=2048,
                num_hidden_layers=16,
                num_attention_heads=16,
                max_position_embeddings=4096,
                rms_norm_eps=1e-5,
            ),
            HfField("num_experts", "n_routed_experts", 64, old_names=("num_local_experts",)),
            HfField("num_experts_per_tok", "num_experts_per_tok", 8),
            HfField("norm_topk_prob", "norm_topk_prob", False),
            HfField("router_aux_loss_coef", "lbl_coef", 0.01),
            HfField("clip_qkv", "clip_qkv", None),
        ),
        tensors=(
            *EMBEDDING,
            HEAD,
            *PRE_NORMS,
            *ATTENTION,
            *QK_NORM,
            *expert_tensors(f"{LAYER}.mlp.gate", f"{LAYER}.mlp.experts"),
        ),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed={"attention_bias": False},
        inert={"attention_dropout": 0.0},
        computed_from_hf=_from_hf,
        computed_to_hf=common_fields_to_hf,
        tied=TIED,
    )

    type: Literal["olmoe"] = "olmoe"
    """Name of the model family."""
    seq_len: int = Field(default=4096, gt=0)
    """Maximum sequence length in tokens."""
    num_layers: int = Field(default=16, gt=0)
    """Number of blocks."""
    hidden_dim: int = Field(default=2048, gt=0)
    """Width of the residual stream."""
    intermediate_dim: int = Field(default=1024, gt=0)
    """Width of each expert."""
    num_heads: int = Field(default=16, gt=0)
    """Number of query heads."""
    num_kv_heads: int = Field(default=16, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads."""
    n_routed_experts: int = Field(default=64, gt=0)
    num_experts_per_tok: int = Field(default=8, gt=0)
    norm_topk_prob: bool = False
    """Normalizes the weights of a token's experts to sum to 1."""
    lbl_coef: float = Field(default=0.01, ge=0)
    clip_qkv: float | None = Field(default=None, gt=0)
    """Bound of the absolute values of queries, keys and values. Unset: no bound."""

    def spec(self, vocab_size: int) -> DecoderSpec:
        norm = self.norm_spec()
        attention = replace(self.attention_spec(), qk_norm=QkNormSpec(norm, over="heads"), clip=self.clip_qkv)
        experts = self.moe_spec(self.intermediate_dim, router=RouterSpec(renormalize=self.norm_topk_prob))
        return self.decoder_spec(vocab_size, (BlockSpec(attention, experts, pre_norm=norm),) * self.num_layers)
