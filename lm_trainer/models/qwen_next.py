"""Qwen3-Next (Qwen team 2025): Gated DeltaNet in three of four layers, gated attention in the others, zero-centred
norms, and a mixture of many small experts.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lm_trainer.models.experts import GroupedExpertsConfig, expert_tensors, shared_expert_tensors
from lm_trainer.models.hf_table import HfFamily, HfField, HfTensor, linear_tensors
from lm_trainer.models.qwen_moe import check_layers_exist, dense_layers
from lm_trainer.models.rope import AnyRope, DefaultRope, fraction_from_hf, fraction_to_hf, rope_from_hf
from lm_trainer.models.rotary import (
    BLOCK,
    EMBEDDING,
    HEAD,
    LAYER,
    MLP,
    PRE_NORMS,
    QK_NORM,
    TIED,
    common_fields_to_hf,
    heads_from_hf,
    hf_fields_of_one_activation,
)
from lm_trainer.nn.expert_spec import RouterSpec, SharedExpertSpec
from lm_trainer.nn.mixer_spec import DeltaSpec
from lm_trainer.nn.spec import AttentionSpec, BlockSpec, DecoderSpec, NormSpec, QkNormSpec

_FRACTION, _INTERVAL = 0.25, 4
_DELTA = f"{LAYER}.linear_attn"

DELTA_NET = (
    *linear_tensors(f"{_DELTA}.in_proj_qkvz", f"{BLOCK}.attention.qkvz"),
    *linear_tensors(f"{_DELTA}.in_proj_ba", f"{BLOCK}.attention.ba"),
    HfTensor(
        f"{_DELTA}.conv1d.weight", tuple(f"{BLOCK}.attention.{name}_conv.weight" for name in "qkv"), reversed=True
    ),
    HfTensor(f"{_DELTA}.dt_bias", (f"{BLOCK}.attention.dt_bias",)),
    HfTensor(f"{_DELTA}.A_log", (f"{BLOCK}.attention.a_log",)),
    HfTensor(f"{_DELTA}.norm.weight", (f"{BLOCK}.attention.norm.scale",)),
    *linear_tensors(f"{_DELTA}.out_proj", f"{BLOCK}.attention.readout"),
)
# In the file, each head of queries is followed by its gate.
GATED_ATTENTION = (
    *linear_tensors(f"{LAYER}.self_attn.q_proj", f"{BLOCK}.attention.q", f"{BLOCK}.attention.gate", interleaved=True),
    *linear_tensors(f"{LAYER}.self_attn.k_proj", f"{BLOCK}.attention.k"),
    *linear_tensors(f"{LAYER}.self_attn.v_proj", f"{BLOCK}.attention.v"),
    *linear_tensors(f"{LAYER}.self_attn.o_proj", f"{BLOCK}.attention.out"),
)


def _layer_types(num_layers: int, interval: int) -> list[str]:
    return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)]


def _interval_from_hf(hf: Mapping[str, Any]) -> int:
    interval, kinds = hf.get("full_attention_interval") or _INTERVAL, hf.get("layer_types")
    if kinds is None:
        return interval
    first = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    if kinds != _layer_types(len(kinds), first):
        raise ValueError("layer_types is not supported, only one full_attention layer after every n linear_attention")
    return first


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "full_attention_interval": _interval_from_hf(hf),
        "mlp_only_layers": tuple(hf.get("mlp_only_layers") or ()),
        "rope": rope_from_hf(hf),
        "partial_rotary_factor": fraction_from_hf(hf, _FRACTION),
        **heads_from_hf(hf, kv_heads=2, head_dim=256),
    }


def _to_hf(config: "Qwen3NextConfig") -> dict[str, Any]:
    return {
        "layer_types": _layer_types(config.num_layers, config.full_attention_interval),
        "full_attention_interval": config.full_attention_interval,
        "mlp_only_layers": list(config.mlp_only_layers),
        **fraction_to_hf(common_fields_to_hf(config), config.partial_rotary_factor),
    }


class Qwen3NextConfig(GroupedExpertsConfig):
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
            HfField("linear_num_value_heads", "linear_num_value_heads", 32),
            HfField("linear_num_key_heads", "linear_num_key_heads", 16),
            HfField("linear_key_head_dim", "linear_key_head_dim", 128),
            HfField("linear_value_head_dim", "linear_value_head_dim", 128),
            HfField("linear_conv_kernel_dim", "linear_conv_width", 4),
            HfField("num_experts", "n_routed_experts", 512, old_names=("num_local_experts",)),
            HfField("num_experts_per_tok", "num_experts_per_tok", 10),
            HfField("moe_intermediate_size", "moe_intermediate_dim", 512),
            HfField("shared_expert_intermediate_size", "shared_intermediate_dim", 512),
            HfField("norm_topk_prob", "norm_topk_prob", True),
            HfField("decoder_sparse_step", "decoder_sparse_step", 1),
            HfField("router_aux_loss_coef", "lbl_coef", 0.001),
        ),
        tensors=(
            *EMBEDDING,
            HEAD,
            *PRE_NORMS,
            *GATED_ATTENTION,
            *QK_NORM,
            *DELTA_NET,
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
        # The module for the prediction of several tokens, which transformers leaves out too.
        ignored=r"mtp\..*",
        tied=TIED,
    )

    activation_function: ClassVar[str] = "silu"  # pyright: ignore[reportIncompatibleVariableOverride]

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
    layer_norm_epsilon: float = Field(default=1e-6, gt=0)
    """Epsilon that is added to the mean square in the norms."""
    rope: AnyRope = DefaultRope(theta=10_000_000.0)
    """Rotary position embedding (RoPE) of layers with attention."""
    partial_rotary_factor: float = Field(default=_FRACTION, gt=0, le=1)
    """Fraction of each head's dimensions that is rotated, counted from the first dimension."""
    full_attention_interval: int = Field(default=_INTERVAL, gt=0)
    """Every n-th layer has attention. The other layers have Gated DeltaNet."""
    linear_num_value_heads: int = Field(default=32, gt=0)
    """Number of heads of values of Gated DeltaNet."""
    linear_num_key_heads: int = Field(default=16, gt=0)
    """Number of heads of queries and keys of Gated DeltaNet."""
    linear_key_head_dim: int = Field(default=128, gt=0)
    """Size of queries and keys of Gated DeltaNet."""
    linear_value_head_dim: int = Field(default=128, gt=0)
    """Size of values of Gated DeltaNet."""
    linear_conv_width: int = Field(default=4, gt=1)
    """Number of positions that the convolutions of Gated DeltaNet read."""
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
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads={self.linear_num_value_heads} is not a multiple of "
                f"linear_num_key_heads={self.linear_num_key_heads}"
            )
        return self

    @property
    def rotated_fraction(self) -> float:
        return self.partial_rotary_factor

    def norm_spec(self) -> NormSpec:
        return replace(super().norm_spec(), unit_offset=True)

    def mixers(self) -> list[AttentionSpec | DeltaSpec]:
        """Returns the mixer of each layer."""
        attention = replace(self.attention_spec(), qk_norm=QkNormSpec(self.norm_spec()), gated=True)
        delta = DeltaSpec(
            num_heads=self.linear_num_value_heads,
            num_key_heads=self.linear_num_key_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            norm=super().norm_spec(),
            conv_width=self.linear_conv_width,
        )
        kinds = _layer_types(self.num_layers, self.full_attention_interval)
        return [attention if kind == "full_attention" else delta for kind in kinds]

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
