"""Granite 4 (IBM 2025): state-space models in most layers, attention in the others, an MLP that all tokens pass, with
or without experts, and Granite 3's constant multipliers.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lm_trainer.models.experts import OptionalExpertsConfig
from lm_trainer.models.granite import MULTIPLIERS
from lm_trainer.models.hf_table import HfFamily, HfField, HfTensor
from lm_trainer.models.mamba import state_space_tensors, time_step_limit_from_hf, time_step_limit_to_hf
from lm_trainer.models.qwen_moe import check_layers_exist
from lm_trainer.models.rope import rope_from_hf
from lm_trainer.models.rotary import (
    ATTENTION,
    BLOCK,
    EMBEDDING,
    HEAD,
    LAYER,
    PRE_NORMS,
    TIED,
    common_fields_to_hf,
    heads_from_hf,
    hf_fields_of_one_activation,
)
from lm_trainer.nn.expert_spec import MoeSpec, RouterSpec, SharedExpertSpec
from lm_trainer.nn.mixer_spec import StateSpaceSpec
from lm_trainer.nn.spec import BlockSpec, DecoderSpec, EmbeddingSpec, MlpSpec

_STATE_SPACE = {"mamba", "linear_attention"}
_INTERVAL, _FIRST = 10, 5


def _mlp_tensors(module: str) -> tuple[HfTensor, ...]:
    """Lists the tensors of the MLP that all tokens pass, which is `module` here. The file joins gate and up."""
    gate, up, down = (f"{BLOCK}.mlp{module}.{name}.weight" for name in ("gate", "up", "down"))
    return (
        HfTensor(f"{LAYER}.shared_mlp.input_linear.weight", (gate, up), transposed=True),
        HfTensor(f"{LAYER}.shared_mlp.output_linear.weight", (down,), transposed=True),
    )


# All experts of a layer are one tensor.
_EXPERTS = (
    HfTensor(f"{LAYER}.block_sparse_moe.router.layer.weight", (f"{BLOCK}.mlp.router",), transposed=True),
    HfTensor(
        f"{LAYER}.block_sparse_moe.input_linear.weight", (f"{BLOCK}.mlp.gate", f"{BLOCK}.mlp.up"), transposed=True
    ),
    HfTensor(f"{LAYER}.block_sparse_moe.output_linear.weight", (f"{BLOCK}.mlp.down",), transposed=True),
)


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    kinds = hf.get("layer_types") or hf.get("layers_block_type")
    hidden, heads, expand = hf.get("hidden_size") or 4096, hf.get("mamba_n_heads") or 128, hf.get("mamba_expand") or 2
    size = hf.get("mamba_d_head") or "auto"
    size = expand * hidden // heads if size == "auto" else size
    if heads * size != expand * hidden:
        raise ValueError(
            f"mamba_n_heads={heads} of mamba_d_head={size} are not mamba_expand={expand} times hidden_size={hidden}"
        )
    return {
        "attention_layers": tuple(i for i, kind in enumerate(kinds or ()) if kind not in _STATE_SPACE),
        "use_rope": hf.get("position_embedding_type") == "rope",
        "mamba_head_dim": size,
        "time_step_limit": time_step_limit_from_hf(hf),
        # A model without experts may have any number of experts per token in its file.
        **({} if hf.get("num_local_experts", 8) else {"num_experts_per_tok": 0}),
        "rope": rope_from_hf(hf),
        **heads_from_hf(hf, kv_heads=None),
    }


def _to_hf(config: "Granite4Config") -> dict[str, Any]:
    width, layers = config.mamba_num_heads * config.mamba_head_dim, config.layers_with_attention
    if width % config.hidden_dim:
        raise ValueError(
            f"mamba_num_heads * mamba_head_dim = {width} is not a multiple of hidden_dim={config.hidden_dim}"
        )
    return {
        "layer_types": ["attention" if layer in layers else "mamba" for layer in range(config.num_layers)],
        "position_embedding_type": "rope" if config.use_rope else "nope",
        "mamba_d_head": config.mamba_head_dim,
        "mamba_expand": width // config.hidden_dim,
        **time_step_limit_to_hf(config.time_step_limit),
        **common_fields_to_hf(config),
    }


class Granite4Config(OptionalExpertsConfig):
    """The Granite 4 family; the defaults are Granite 4.0 H Tiny."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="granitemoehybrid",
        reference="ibm-granite/granite-4.0-h-tiny-base",
        architecture="GraniteMoeHybridForCausalLM",
        fields=(
            *hf_fields_of_one_activation(),
            *(HfField(name, name, 1.0) for name in MULTIPLIERS),
            HfField("num_local_experts", "n_routed_experts", 8),
            HfField("num_experts_per_tok", "num_experts_per_tok", 2),
            HfField("shared_intermediate_size", "shared_intermediate_dim", 1024),
            HfField("router_aux_loss_coef", "lbl_coef", 0.001),
            HfField("mamba_n_heads", "mamba_num_heads", 128),
            HfField("mamba_n_groups", "mamba_num_groups", 1),
            HfField("mamba_d_state", "mamba_state_dim", 256),
            HfField("mamba_d_conv", "mamba_conv_width", 4),
            HfField("mamba_chunk_size", "mamba_chunk_size", 256),
            HfField("mamba_conv_bias", "mamba_conv_bias", True),
            HfField("mamba_proj_bias", "mamba_use_bias", False),
        ),
        tensors=(
            *EMBEDDING,
            HEAD,
            *PRE_NORMS,
            *ATTENTION,
            *state_space_tensors(f"{LAYER}.mamba"),
            *_mlp_tensors(""),
            *_mlp_tensors(".shared.mlp"),
            *_EXPERTS,
        ),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        # The activation of the convolutions and gates too, so no other one is supported.
        fixed={"attention_bias": False, "hidden_act": "silu"},
        inert={"attention_dropout": 0.0},
        read_only=("time_step_limit", "layers_block_type", "init_method", "normalization_function"),
        computed_from_hf=_from_hf,
        computed_to_hf=_to_hf,
        tied=TIED,
    )

    activation_function: ClassVar[Literal["silu"]] = "silu"  # pyright: ignore[reportIncompatibleVariableOverride]

    type: Literal["granite4"] = "granite4"
    """Name of the model family."""
    seq_len: int = Field(default=131072, gt=0)
    """Maximum sequence length in tokens."""
    num_layers: int = Field(default=40, gt=0)
    """Number of blocks."""
    hidden_dim: int = Field(default=1536, gt=0)
    """Width of the residual stream."""
    intermediate_dim: int = Field(default=512, gt=0)
    """Width of each expert."""
    shared_intermediate_dim: int = Field(default=1024, gt=0)
    """Width of the MLP that processes every token."""
    num_heads: int = Field(default=12, gt=0)
    """Number of query heads of layers with attention."""
    num_kv_heads: int = Field(default=4, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads."""
    tie_word_embeddings: bool = True
    """Ties the weights of the output layer to the token embedding."""
    attention_layers: tuple[int, ...] | None = None
    """Indices of layers, counted from 0, that have attention. The other layers have a state-space model. Unset: 5, 15,
    25 and so on."""
    use_rope: bool = False
    """Rotates queries and keys. Otherwise attention has no positions."""
    mamba_num_heads: int = Field(default=48, gt=0)
    """Number of heads of state-space models."""
    mamba_head_dim: int = Field(default=64, gt=0)
    """Number of dimensions per head of state-space models."""
    mamba_state_dim: int = Field(default=128, gt=0)
    """Size of the state of each dimension of a head."""
    mamba_num_groups: int = Field(default=1, gt=0)
    """Number of groups of heads, which share the vectors that write to the state and read from it."""
    mamba_conv_width: int = Field(default=4, gt=1)
    """Number of positions that the convolution of state-space models reads."""
    mamba_chunk_size: int = Field(default=256, gt=0)
    """Number of positions that are computed at once. Results are the same up to rounding."""
    mamba_conv_bias: bool = True
    """Adds a bias to the convolution."""
    mamba_use_bias: bool = False
    """Adds biases to the linear maps of input and result of state-space models."""
    time_step_limit: tuple[float, float | None] = (0.0, None)
    """Bounds of the time step; no upper bound is `null`."""
    n_routed_experts: int = Field(default=64, ge=0)
    """Number of experts in each layer. 0: no experts, so only the MLP that processes every token."""
    num_experts_per_tok: int = Field(default=6, ge=0)
    """Number of experts that process each token."""
    embedding_multiplier: float = Field(default=12.0, gt=0)
    """Factor of the token embeddings."""
    attention_multiplier: float = Field(default=1 / 128, gt=0)
    """Factor of the attention scores, which replaces 1 / sqrt(head_dim)."""
    residual_multiplier: float = Field(default=0.22, gt=0)
    """Factor of the outputs of both parts of a layer, before they are added to the residual stream."""
    logits_scaling: float = Field(default=6.0, gt=0)
    """Divides the logits."""

    @model_validator(mode="after")
    def _check_parts(self) -> "Granite4Config":
        check_layers_exist(self.attention_layers or (), self.num_layers, name="attention_layers")
        if self.mamba_num_heads % self.mamba_num_groups:
            raise ValueError(
                f"mamba_num_heads={self.mamba_num_heads} is not a multiple of mamba_num_groups={self.mamba_num_groups}"
            )
        return self

    @property
    def layers_with_attention(self) -> tuple[int, ...]:
        """`attention_layers` with its default resolved."""
        layers = self.attention_layers
        return tuple(range(_FIRST, self.num_layers, _INTERVAL)) if layers is None else layers

    def state_space_spec(self) -> StateSpaceSpec:
        """Spec of the mixer of a layer without attention."""
        low, high = self.time_step_limit
        return StateSpaceSpec(
            num_heads=self.mamba_num_heads,
            head_dim=self.mamba_head_dim,
            state_dim=self.mamba_state_dim,
            norm=self.norm_spec(),
            num_groups=self.mamba_num_groups,
            norm_groups=self.mamba_num_groups,
            conv_width=self.mamba_conv_width,
            conv_bias=self.mamba_conv_bias,
            bias=self.mamba_use_bias,
            time_step_limit=(low, math.inf if high is None else high),
            chunk_size=self.mamba_chunk_size,
        )

    def block_mlp_spec(self) -> MlpSpec | MoeSpec:
        """Spec of the second part of a layer."""
        if not self.n_routed_experts:
            return MlpSpec(self.shared_intermediate_dim, self.activation_function, bias=False, gated=True)
        # The softmax of only the highest logits is the softmax of all, normalized over the selected experts.
        router, shared = RouterSpec(renormalize=True), SharedExpertSpec(self.shared_intermediate_dim)
        return self.moe_spec(self.intermediate_dim, router=router, shared=shared)

    def spec(self, vocab_size: int) -> DecoderSpec:
        attention = replace(self.attention_spec(), scores=self.score_spec(self.attention_multiplier))
        if not self.use_rope:
            attention = replace(attention, positions=None)
        recurrent = BlockSpec(
            self.state_space_spec(),
            self.block_mlp_spec(),
            pre_norm=self.norm_spec(),
            residual_scale=self.residual_multiplier,
        )
        attending = replace(recurrent, mixer=attention)
        layers = self.layers_with_attention
        return self.decoder_spec(
            vocab_size,
            tuple(attending if layer in layers else recurrent for layer in range(self.num_layers)),
            embedding=EmbeddingSpec(scale=self.embedding_multiplier),
            logit_scale=1.0 / self.logits_scaling,
        )
