"""GLM-4.5 (GLM team 2025): a mixture of experts with sigmoid scores, a bias for their selection instead of a loss, an
expert for all tokens, and first layers without experts.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lm_trainer.models.experts import (
    GroupedExpertsConfig,
    check_expert_groups,
    expert_tensors,
    selection_bias_tensor,
    shared_expert_tensors,
)
from lm_trainer.models.hf_table import HfFamily, HfField
from lm_trainer.models.multi_token import DEPTH, MultiTokenConfig, with_module_tensors
from lm_trainer.models.rope import fraction_from_hf, fraction_to_hf, rope_from_hf
from lm_trainer.models.rotary import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    LAYER,
    MLP,
    PRE_NORMS,
    QK_NORM,
    TIED,
    common_fields_to_hf,
    heads_from_hf,
    hf_fields,
)
from lm_trainer.nn.expert_spec import BalanceScope, ExpertGroupsSpec, RouterSpec, SharedExpertSpec
from lm_trainer.nn.spec import BlockSpec, DecoderSpec, QkNormSpec

_FRACTION = 0.5


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rope": rope_from_hf(hf),
        "partial_rotary_factor": fraction_from_hf(hf, _FRACTION),
        **heads_from_hf(hf, kv_heads=8),
    }


def _to_hf(config: "Glm4MoeConfig") -> dict[str, Any]:
    return fraction_to_hf(common_fields_to_hf(config), config.partial_rotary_factor)


class Glm4MoeConfig(MultiTokenConfig, GroupedExpertsConfig):
    """The GLM-4.5 family; the defaults are GLM-4.5 Air."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="glm4_moe",
        reference="zai-org/GLM-4.5-Air-Base",
        architecture="Glm4MoeForCausalLM",
        fields=(
            *hf_fields(
                intermediate_size=10944,
                num_hidden_layers=46,
                num_attention_heads=96,
                max_position_embeddings=131072,
                rms_norm_eps=1e-5,
            ),
            HfField("attention_bias", "use_bias", False),
            HfField("use_qk_norm", "use_qk_norm", False),
            HfField("moe_intermediate_size", "moe_intermediate_dim", 1408),
            HfField("num_experts_per_tok", "num_experts_per_tok", 8),
            HfField("n_routed_experts", "n_routed_experts", 128),
            HfField("n_shared_experts", "n_shared_experts", 1),
            HfField("routed_scaling_factor", "routed_scaling_factor", 1.0),
            HfField("n_group", "n_group", 1),
            HfField("topk_group", "topk_group", 1),
            HfField("first_k_dense_replace", "first_k_dense_replace", 1),
            HfField("norm_topk_prob", "norm_topk_prob", True),
            DEPTH,
        ),
        tensors=with_module_tensors(
            (
                *EMBEDDING,
                HEAD,
                *PRE_NORMS,
                *ATTENTION,
                *QK_NORM,
                *MLP,
                *expert_tensors(f"{LAYER}.mlp.gate", f"{LAYER}.mlp.experts"),
                selection_bias_tensor(f"{LAYER}.mlp.gate.e_score_correction_bias"),
                *shared_expert_tensors(f"{LAYER}.mlp.shared_experts"),
            )
        ),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed={},
        inert={"attention_dropout": 0.0},
        computed_from_hf=_from_hf,
        computed_to_hf=_to_hf,
        tied=TIED,
    )

    type: Literal["glm4_moe"] = "glm4_moe"
    """Name of the model family."""
    seq_len: int = Field(default=32768, gt=0)
    """Maximum sequence length in tokens."""
    num_layers: int = Field(default=46, gt=0)
    """Number of blocks."""
    intermediate_dim: int = Field(default=10944, gt=0)
    """Width of the MLP of layers without experts."""
    num_heads: int = Field(default=96, gt=0)
    """Number of query heads."""
    num_kv_heads: int = Field(default=8, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads."""
    head_dim: int | None = Field(default=128, gt=0, multiple_of=2)
    """Number of dimensions per head. Unset: hidden_dim / num_heads."""
    use_bias: bool = True
    """Adds biases to queries, keys and values."""
    use_qk_norm: bool = False
    """Normalizes each head of queries and keys."""
    partial_rotary_factor: float = Field(default=_FRACTION, gt=0, le=1)
    """Fraction of each head's dimensions that is rotated, counted from the first dimension."""
    moe_intermediate_dim: int = Field(default=1408, gt=0)
    """Width of each expert."""
    n_routed_experts: int = Field(default=128, gt=0)
    num_experts_per_tok: int = Field(default=8, gt=0)
    n_shared_experts: int = Field(default=1, gt=0)
    """Width of the expert that processes every token, in multiples of moe_intermediate_dim."""
    first_k_dense_replace: int = Field(default=1, ge=0)
    """Number of first layers with a plain MLP instead of experts."""
    norm_topk_prob: bool = True
    """Normalizes the weights of a token's experts to sum to 1."""
    routed_scaling_factor: float = Field(default=1.0, gt=0)
    """Factor of the weights of a token's experts."""
    n_group: int = Field(default=1, gt=0)
    """Number of groups of experts."""
    topk_group: int = Field(default=1, gt=0)
    """Number of groups from which a token chooses its experts."""
    lbl_coef: float = Field(default=0.0, ge=0)
    lbl_over: BalanceScope = "row"
    selection_bias_rate: float = Field(default=0.001, ge=0)
    """Balances the load without a loss: each step raises a bias of experts with less than the mean load of the global
    batch by this rate, and lowers it for the others. The bias affects only the selection of experts. 0: the bias stays
    the same."""

    @model_validator(mode="after")
    def _check_groups(self) -> "Glm4MoeConfig":
        check_expert_groups(self, self.n_group, self.topk_group)
        return self

    @property
    def rotated_fraction(self) -> float:
        return self.partial_rotary_factor

    def spec(self, vocab_size: int) -> DecoderSpec:
        norm = self.norm_spec()
        qk_norm = QkNormSpec(norm) if self.use_qk_norm else None
        attention = replace(self.attention_spec(), bias=self.use_bias, qk_norm=qk_norm)
        plain = BlockSpec(attention, self.mlp_spec(), pre_norm=norm)
        router = RouterSpec(
            scores="sigmoid",
            renormalize=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
            groups=ExpertGroupsSpec(self.n_group, self.topk_group) if self.n_group > 1 else None,
        )
        shared = SharedExpertSpec(self.n_shared_experts * self.moe_intermediate_dim)
        sparse = replace(plain, mlp=self.moe_spec(self.moe_intermediate_dim, router=router, shared=shared))
        first = min(self.first_k_dense_replace, self.num_layers)
        blocks = (plain,) * first + (sparse,) * (self.num_layers - first)
        return self.with_modules(self.decoder_spec(vocab_size, blocks, prefix=first), sparse)
