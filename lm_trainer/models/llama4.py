"""The text model of Llama 4 (Meta 2025): layers with rotary positions see chunks, every fourth layer has no positions
and sees everything, and a token passes one expert that is chosen and one that all tokens pass.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lm_trainer.models.experts import GroupedExpertsConfig, shared_expert_tensors
from lm_trainer.models.hf_table import HfFamily, HfField, HfTensor, linear_tensors
from lm_trainer.models.no_rope import (
    LayersWithoutRopeConfig,
    every_nth_layer,
    listed_or_every_nth,
    no_rope_from_hf,
    no_rope_to_hf,
)
from lm_trainer.models.qwen_moe import check_layers_exist
from lm_trainer.models.rope import AnyRope, DefaultRope, normalized_rotation, rope_from_hf
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
    hf_fields,
)
from lm_trainer.nn.expert_spec import RouterSpec, SharedExpertSpec
from lm_trainer.nn.spec import BlockSpec, DecoderSpec, NormSpec, PositionScaleSpec

_LAYERS, _THETA = 48, 500_000.0

_MLP = tuple(
    tensor
    for name in ("gate", "up", "down")
    for tensor in linear_tensors(f"{LAYER}.feed_forward.{name}_proj", f"{BLOCK}.mlp.{name}")
)
# All experts of a layer are one tensor, with inputs before outputs.
_EXPERTS = (
    HfTensor(f"{LAYER}.feed_forward.router.weight", (f"{BLOCK}.mlp.router",), transposed=True),
    HfTensor(f"{LAYER}.feed_forward.experts.gate_up_proj", (f"{BLOCK}.mlp.gate", f"{BLOCK}.mlp.up")),
    HfTensor(f"{LAYER}.feed_forward.experts.down_proj", (f"{BLOCK}.mlp.down",)),
    *shared_expert_tensors(f"{LAYER}.feed_forward.shared_expert"),
)


def _layer_types(without_rope: tuple[int, ...], num_layers: int) -> list[str]:
    return ["full_attention" if layer in without_rope else "chunked_attention" for layer in range(num_layers)]


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, step = hf.get("num_hidden_layers") or _LAYERS, hf.get("interleave_moe_layer_step") or 1
    no_rope = no_rope_from_hf(hf, num_layers)
    without_rope = listed_or_every_nth(no_rope["layers_without_rope"], no_rope["no_rope_layer_interval"], num_layers)
    kinds = _layer_types(without_rope, num_layers)
    if (hf.get("layer_types") or kinds) != kinds:
        raise ValueError("layer_types is not supported where it differs from no_rope_layers")
    moe_layers = every_nth_layer(step, num_layers) if hf.get("moe_layers") is None else tuple(hf["moe_layers"])
    return {
        **no_rope,
        "moe_layers": None if moe_layers == every_nth_layer(step, num_layers) else moe_layers,
        "rope": rope_from_hf(hf, _THETA),
        **heads_from_hf(hf, kv_heads=8, head_dim=128),
    }


def _to_hf(config: "Llama4Config") -> dict[str, Any]:
    return {
        **no_rope_to_hf(config),
        "layer_types": _layer_types(config.indices_without_rope, config.num_layers),
        "moe_layers": list(config.indices_with_experts),
        **common_fields_to_hf(config),
    }


class Llama4Config(LayersWithoutRopeConfig, GroupedExpertsConfig):
    """The text model of the Llama 4 family; the defaults are Llama 4 Scout."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="llama4_text",
        architecture="Llama4ForCausalLM",
        fields=(
            *(
                entry
                for entry in hf_fields(
                    hidden_size=5120,
                    num_hidden_layers=_LAYERS,
                    num_attention_heads=40,
                    max_position_embeddings=131072,
                    rms_norm_eps=1e-5,
                )
                if entry.hf != "intermediate_size"
            ),
            HfField("intermediate_size", "moe_intermediate_dim", 8192),
            HfField("intermediate_size_mlp", "intermediate_dim", 16384),
            HfField("attention_bias", "use_bias", False),
            HfField("use_qk_norm", "use_qk_norm", True),
            HfField("attention_chunk_size", "attention_chunk_size", 8192),
            HfField("attn_temperature_tuning", "attn_temperature_tuning", True),
            HfField("floor_scale", "floor_scale", 8192),
            HfField("attn_scale", "attn_scale", 0.1),
            HfField("num_local_experts", "n_routed_experts", 16),
            HfField("num_experts_per_tok", "num_experts_per_tok", 1),
            HfField("interleave_moe_layer_step", "interleave_moe_layer_step", 1),
            HfField("router_aux_loss_coef", "lbl_coef", 0.001),
        ),
        tensors=(*EMBEDDING, HEAD, *PRE_NORMS, *ATTENTION, *_MLP, *_EXPERTS),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed={},
        inert={"attention_dropout": 0.0, "router_jitter_noise": 0.0},
        computed_from_hf=_from_hf,
        computed_to_hf=_to_hf,
        tied=TIED,
    )

    type: Literal["llama4"] = "llama4"
    """Name of the model family."""
    seq_len: int = Field(default=131072, gt=0)
    """Maximum sequence length in tokens."""
    num_layers: int = Field(default=_LAYERS, gt=0)
    """Number of blocks."""
    hidden_dim: int = Field(default=5120, gt=0)
    """Width of the residual stream."""
    intermediate_dim: int = Field(default=16384, gt=0)
    """Width of the MLP of layers without experts."""
    moe_intermediate_dim: int = Field(default=8192, gt=0)
    """Width of each expert, and of the expert that processes every token."""
    num_heads: int = Field(default=40, gt=0)
    """Number of query heads."""
    num_kv_heads: int = Field(default=8, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads."""
    head_dim: int | None = Field(default=128, gt=0, multiple_of=2)
    """Number of dimensions per head. `null`: hidden_dim / num_heads."""
    rope: AnyRope = DefaultRope(theta=_THETA)
    """Rotary position embedding of the layers that have one."""
    use_bias: bool = False
    """Adds biases to queries, keys, values and the output of attention."""
    use_qk_norm: bool = True
    """Normalizes queries and keys of the layers with rotary positions, without learned gains."""
    attention_chunk_size: int | None = Field(default=8192, gt=0)
    """Number of positions of a chunk. In a layer with rotary positions, a position sees only its own chunk of a
    document. `null`: all previous positions."""
    attn_temperature_tuning: bool = True
    """Multiplies the scores of layers without positions by 1 + attn_scale log(1 + floor((position + 1) / floor_scale)),
    with positions counted from 0."""
    floor_scale: int = Field(default=8192, gt=0)
    """Number of positions with the same factor of the scores (`attn_temperature_tuning`)."""
    attn_scale: float = 0.1
    """Growth of this factor."""
    n_routed_experts: int = Field(default=16, gt=0)
    """Number of experts in each layer."""
    num_experts_per_tok: int = Field(default=1, gt=0)
    """Number of experts that process each token."""
    interleave_moe_layer_step: int = Field(default=1, gt=0)
    """Every n-th layer has experts, unless `moe_layers` lists these layers. The other layers have a plain MLP."""
    moe_layers: tuple[int, ...] | None = None
    """Indices, counted from 0, of the layers with experts. Unset: every n-th layer (`interleave_moe_layer_step`)."""

    @model_validator(mode="after")
    def _check_moe_layers_exist(self) -> "Llama4Config":
        check_layers_exist(self.moe_layers or (), self.num_layers, name="moe_layers")
        return self

    @property
    def indices_with_experts(self) -> tuple[int, ...]:
        """`moe_layers` with its default resolved."""
        return listed_or_every_nth(self.moe_layers, self.interleave_moe_layer_step, self.num_layers)

    def spec(self, vocab_size: int) -> DecoderSpec:
        plain = replace(self.attention_spec(), bias=self.use_bias, out_bias=self.use_bias)
        scale = PositionScaleSpec(self.floor_scale, self.attn_scale) if self.attn_temperature_tuning else None
        without_rope = replace(plain, positions=None, scores=replace(plain.scores, position_scale=scale))
        rope, qk_norm = self.rope.spec(self.seq_len), None
        if self.use_qk_norm:
            norm = NormSpec(kind="rms", eps=self.layer_norm_epsilon, bias=False, scale=False)
            rope, qk_norm = normalized_rotation(rope, norm)
        with_rope = replace(
            plain, positions=replace(rope, interleaved=True), qk_norm=qk_norm, chunk=self.attention_chunk_size
        )
        router = RouterSpec(scores="sigmoid", renormalize=False)
        shared = SharedExpertSpec(self.moe_intermediate_dim)
        experts = replace(self.moe_spec(self.moe_intermediate_dim, router=router, shared=shared), weighs_inputs=True)

        def block(layer: int) -> BlockSpec:
            attention = without_rope if layer in self.indices_without_rope else with_rope
            mlp = experts if layer in self.indices_with_experts else self.mlp_spec()
            return BlockSpec(attention, mlp, pre_norm=self.norm_spec())

        return self.decoder_spec(vocab_size, tuple(map(block, range(self.num_layers))))
