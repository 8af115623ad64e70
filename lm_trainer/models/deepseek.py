"""DeepSeek-V2 and V3 (DeepSeek-AI 2024, arXiv 2405.04434 and 2412.19437): multi-head latent attention, and a mixture of
many small experts with an expert for all tokens after the first layers. Kimi K2 is a DeepSeek-V3 model.
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
from lm_trainer.models.latent import LATENT_ATTENTION, LatentConfig, latent_fields, latent_from_hf, latent_to_hf
from lm_trainer.models.multi_token import DEPTH, MultiTokenConfig, with_module_tensors
from lm_trainer.models.rotary import EMBEDDING, HEAD, LAYER, MLP, PRE_NORMS, TIED, hf_fields
from lm_trainer.nn.expert_spec import BalanceScope, ExpertGroupsSpec, RouterSpec, SharedExpertSpec
from lm_trainer.nn.spec import BlockSpec, DecoderSpec

_TENSORS = (
    *EMBEDDING,
    HEAD,
    *PRE_NORMS,
    *LATENT_ATTENTION,
    *MLP,
    *expert_tensors(f"{LAYER}.mlp.gate", f"{LAYER}.mlp.experts"),
    *shared_expert_tensors(f"{LAYER}.mlp.shared_experts"),
)
_INERT = {"attention_dropout": 0.0, "pretraining_tp": 1, "ep_size": 1}


def _expert_fields(*, shared: int, scale: float, dense: int) -> tuple[HfField, ...]:
    """Returns the fields of the experts, given transformers' defaults where the families differ."""
    return (
        HfField("n_shared_experts", "n_shared_experts", shared),
        HfField("routed_scaling_factor", "routed_scaling_factor", scale),
        HfField("first_k_dense_replace", "first_k_dense_replace", dense),
    )


class _DeepseekConfig(LatentConfig, GroupedExpertsConfig):
    """Settings and layers that both generations share."""

    moe_intermediate_dim: int = Field(default=2048, gt=0)
    """Width of each expert."""
    n_shared_experts: int = Field(default=1, gt=0)
    """Width of the expert that processes every token, in multiples of moe_intermediate_dim."""
    first_k_dense_replace: int = Field(default=3, ge=0)
    """Number of first layers with a plain MLP instead of experts."""
    routed_scaling_factor: float = Field(default=2.5, gt=0)
    """Factor of the weights of a token's experts."""
    n_group: int = Field(default=8, gt=0)
    """Number of groups of experts."""
    topk_group: int = Field(default=4, gt=0)
    """Number of groups from which a token chooses its experts."""

    @model_validator(mode="after")
    def _check_groups(self) -> "_DeepseekConfig":
        check_expert_groups(self, self.n_group, self.topk_group)
        return self

    def sparse_block(self, router: RouterSpec, *, interleaved: bool = True) -> BlockSpec:
        """Builds the spec of a layer with experts. Arguments as for `expert_spec`."""
        shared = SharedExpertSpec(self.n_shared_experts * self.moe_intermediate_dim)
        experts = self.moe_spec(self.moe_intermediate_dim, router=router, shared=shared)
        return BlockSpec(self.latent_spec(interleaved=interleaved), experts, pre_norm=self.norm_spec())

    def expert_spec(self, vocab_size: int, router: RouterSpec, *, interleaved: bool = True) -> DecoderSpec:
        """Builds the spec of a model with this router. `interleaved` is as in `RopeSpec`."""
        sparse = self.sparse_block(router, interleaved=interleaved)
        plain = replace(sparse, mlp=self.mlp_spec())
        first = min(self.first_k_dense_replace, self.num_layers)
        return self.decoder_spec(vocab_size, (plain,) * first + (sparse,) * (self.num_layers - first), prefix=first)


def _v3_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"q_lora_rank": hf.get("q_lora_rank", 1536), **latent_from_hf(hf)}


def _v3_to_hf(config: "DeepseekV3Config") -> dict[str, Any]:
    return {"q_lora_rank": config.q_lora_rank, **latent_to_hf(config)}


class DeepseekV3Config(MultiTokenConfig, _DeepseekConfig):
    """The DeepSeek-V3 family, which includes Kimi K2; the defaults are DeepSeek-V3, without its scaled rotary
    positions.
    """

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="deepseek_v3",
        reference="deepseek-ai/DeepSeek-V3-Base",
        architecture="DeepseekV3ForCausalLM",
        fields=(
            *hf_fields(
                hidden_size=7168,
                intermediate_size=18432,
                num_hidden_layers=61,
                num_attention_heads=128,
                max_position_embeddings=4096,
            ),
            *latent_fields(latent=512, plain=128, rotary=64),
            HfField("v_head_dim", "v_head_dim", 128),
            HfField("rope_interleave", "rope_interleave", True),
            HfField("moe_intermediate_size", "moe_intermediate_dim", 2048),
            HfField("n_routed_experts", "n_routed_experts", 256, old_names=("num_local_experts",)),
            HfField("num_experts_per_tok", "num_experts_per_tok", 8),
            *_expert_fields(shared=1, scale=2.5, dense=3),
            HfField("n_group", "n_group", 8),
            HfField("topk_group", "topk_group", 4),
            HfField("norm_topk_prob", "norm_topk_prob", True),
            DEPTH,
        ),
        tensors=with_module_tensors((*_TENSORS, selection_bias_tensor(f"{LAYER}.mlp.gate.e_score_correction_bias"))),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed={"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        inert={**_INERT, "aux_loss_alpha": 0.001, "seq_aux": True},
        read_only=("head_dim", "qk_head_dim"),
        computed_from_hf=_v3_from_hf,
        computed_to_hf=_v3_to_hf,
        ignored=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        tied=TIED,
    )

    type: Literal["deepseek_v3"] = "deepseek_v3"
    """Name of the model family."""
    seq_len: int = Field(default=4096, gt=0)
    """Maximum sequence length in tokens."""
    num_layers: int = Field(default=61, gt=0)
    """Number of blocks."""
    hidden_dim: int = Field(default=7168, gt=0)
    """Width of the residual stream."""
    intermediate_dim: int = Field(default=18432, gt=0)
    """Width of the MLP of layers without experts."""
    num_heads: int = Field(default=128, gt=0)
    """Number of heads."""
    layer_norm_epsilon: float = Field(default=1e-6, gt=0)
    """Epsilon that is added to the mean square in the norms, except the norms of latents."""
    rope_interleave: bool = True
    """Adjacent dimensions are the coordinates of a rotation, instead of dimension i of both halves of a head."""
    n_routed_experts: int = Field(default=256, gt=0)
    num_experts_per_tok: int = Field(default=8, gt=0)
    norm_topk_prob: bool = True
    """Normalizes the weights of a token's experts to sum to 1."""
    lbl_coef: float = Field(default=0.0001, ge=0)
    lbl_over: BalanceScope = "row"
    rzl_coef: float = Field(default=0.0, ge=0)
    selection_bias_rate: float = Field(default=0.001, ge=0)
    """Balances the load without a loss: each step raises a bias of experts with less than the mean load of the global
    batch by this rate, and lowers it for the others. The bias affects only the selection of experts. 0: the bias stays
    the same."""

    def spec(self, vocab_size: int) -> DecoderSpec:
        router = RouterSpec(
            scores="sigmoid",
            renormalize=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
            groups=ExpertGroupsSpec(self.n_group, self.topk_group) if self.n_group > 1 else None,
        )
        spec = self.expert_spec(vocab_size, router, interleaved=self.rope_interleave)
        return self.with_modules(spec, self.sparse_block(router, interleaved=self.rope_interleave))


def _v2_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    method = hf.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"topk_method={method!r} is not supported, only 'greedy' and 'group_limited_greedy' are")
    grouped = method == "group_limited_greedy"
    return {
        "q_lora_rank": hf.get("q_lora_rank", 1536),
        "n_group": (hf.get("n_group") or 1) if grouped else 1,
        "topk_group": (hf.get("topk_group") or 1) if grouped else 1,
        **latent_from_hf(hf),
    }


def _v2_to_hf(config: "DeepseekV2Config") -> dict[str, Any]:
    return {
        "q_lora_rank": config.q_lora_rank,
        "topk_method": "group_limited_greedy" if config.n_group > 1 else "greedy",
        "n_group": config.n_group,
        "topk_group": config.topk_group,
        **latent_to_hf(config),
    }


class DeepseekV2Config(_DeepseekConfig):
    """The DeepSeek-V2 family; the defaults are DeepSeek-V2 Lite, without its scaled rotary positions."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="deepseek_v2",
        reference="deepseek-ai/DeepSeek-V2-Lite",
        architecture="DeepseekV2ForCausalLM",
        fields=(
            *hf_fields(max_position_embeddings=2048),
            *latent_fields(latent=512, plain=128, rotary=64),
            HfField("v_head_dim", "v_head_dim", 128),
            HfField("moe_intermediate_size", "moe_intermediate_dim", 1407),
            HfField("n_routed_experts", "n_routed_experts", 64),
            HfField("num_experts_per_tok", "num_experts_per_tok", 8),
            *_expert_fields(shared=2, scale=1.0, dense=0),
        ),
        tensors=_TENSORS,
        prefix="model.",
        unprefixed=(HEAD.hf,),
        # transformers never normalizes the weights of experts.
        fixed={"mlp_bias": False, "norm_topk_prob": False, "moe_layer_freq": 1, "scoring_func": "softmax"},
        inert={**_INERT, "aux_loss_alpha": 0.001, "seq_aux": True},
        read_only=("head_dim", "qk_head_dim", "num_nextn_predict_layers"),
        computed_from_hf=_v2_from_hf,
        computed_to_hf=_v2_to_hf,
        ignored=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        tied=TIED,
    )

    type: Literal["deepseek_v2"] = "deepseek_v2"
    """Name of the model family."""
    seq_len: int = Field(default=4096, gt=0)
    """Maximum sequence length in tokens."""
    num_layers: int = Field(default=27, gt=0)
    """Number of blocks."""
    hidden_dim: int = Field(default=2048, gt=0)
    """Width of the residual stream."""
    intermediate_dim: int = Field(default=10944, gt=0)
    """Width of the MLP of layers without experts."""
    num_heads: int = Field(default=16, gt=0)
    """Number of heads."""
    layer_norm_epsilon: float = Field(default=1e-6, gt=0)
    """Epsilon that is added to the mean square in the norms, except the norms of latents."""
    q_lora_rank: int | None = Field(default=None, gt=0)
    """Size of the latent from which queries are computed. `null`: queries are computed from the input."""
    moe_intermediate_dim: int = Field(default=1408, gt=0)
    """Width of each expert."""
    n_routed_experts: int = Field(default=64, gt=0)
    num_experts_per_tok: int = Field(default=6, gt=0)
    n_shared_experts: int = Field(default=2, gt=0)
    """Width of the expert that processes every token, in multiples of moe_intermediate_dim."""
    first_k_dense_replace: int = Field(default=1, ge=0)
    """Number of first layers with a plain MLP instead of experts."""
    routed_scaling_factor: float = Field(default=1.0, gt=0)
    """Factor of the weights of a token's experts."""
    n_group: int = Field(default=1, gt=0)
    """Number of groups of experts."""
    topk_group: int = Field(default=1, gt=0)
    """Number of groups from which a token chooses its experts."""

    def spec(self, vocab_size: int) -> DecoderSpec:
        router = RouterSpec(
            renormalize=False,
            scale=self.routed_scaling_factor,
            groups=ExpertGroupsSpec(self.n_group, self.topk_group, "max") if self.n_group > 1 else None,
        )
        return self.expert_spec(vocab_size, router)
