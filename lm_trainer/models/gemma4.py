"""Gemma 4 (Gemma team 2026), the text models: layers with windows, and every sixth layer sees everything, with larger
heads, fewer keys, values that are the keys, and rotations of a quarter of each head. Each layer may have experts next
to its MLP, with norms of their own. In the smaller sizes each layer has a token embedding of its own, and the last
layers use the keys and values of earlier ones.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lm_trainer.models.base import ActivationName
from lm_trainer.models.experts import OptionalExpertsConfig, shared_expert_tensors
from lm_trainer.models.gemma import FOUR_NORMS
from lm_trainer.models.hf_table import HfFamily, HfField, HfTensor
from lm_trainer.models.rope import AnyRope, DefaultRope, local_theta_from_hf, parse_rope
from lm_trainer.models.rotary import (
    ATTENTION,
    BLOCK,
    EMBEDDING,
    HEAD,
    LAYER,
    MLP,
    QK_NORM,
    TIED,
    hf_fields,
    layer_norm_tensors,
    layer_types,
)
from lm_trainer.nn.expert_spec import BranchNormSpec, MoeSpec, RouterSpec, SharedExpertSpec
from lm_trainer.nn.spec import (
    BlockSpec,
    DecoderSpec,
    EmbeddingSpec,
    KeySharingSpec,
    LayerEmbeddingSpec,
    MlpSpec,
    QkNormSpec,
)

_FULL = "full_attention"
_EXPERT_FIELDS = {
    "num_experts": "n_routed_experts",
    "top_k_experts": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_dim",
}
# The MLP of a layer with experts is an expert that all tokens pass.
_EXPERTS = (
    *shared_expert_tensors(f"{LAYER}.mlp"),
    *layer_norm_tensors(
        **{
            "mlp.shared_pre_norm": "pre_feedforward_layernorm",
            "mlp.shared_post_norm": "post_feedforward_layernorm_1",
            "mlp.pre_norm": "pre_feedforward_layernorm_2",
            "mlp.post_norm": "post_feedforward_layernorm_2",
        }
    ),
    HfTensor(f"{LAYER}.router.scale", (f"{BLOCK}.mlp.router_norm.scale",)),
    HfTensor(f"{LAYER}.router.proj.weight", (f"{BLOCK}.mlp.router",), transposed=True),
    HfTensor(f"{LAYER}.router.per_expert_scale", (f"{BLOCK}.mlp.expert_scale",)),
    HfTensor(f"{LAYER}.experts.gate_up_proj", (f"{BLOCK}.mlp.gate", f"{BLOCK}.mlp.up"), transposed=True),
    HfTensor(f"{LAYER}.experts.down_proj", (f"{BLOCK}.mlp.down",), transposed=True),
)

_EMBEDDING = f"{BLOCK}.layer_embedding"
_LAYER_EMBEDDING = (
    HfTensor("embed_tokens_per_layer.weight", (f"{_EMBEDDING}.tokens",)),
    HfTensor("per_layer_model_projection.weight", (f"{_EMBEDDING}.project.weight",), transposed=True),
    HfTensor("per_layer_projection_norm.weight", ("embed.layer_norm.scale",)),
    HfTensor(f"{LAYER}.per_layer_input_gate.weight", (f"{_EMBEDDING}.gate.weight",), transposed=True),
    HfTensor(f"{LAYER}.per_layer_projection.weight", (f"{_EMBEDDING}.out.weight",), transposed=True),
    HfTensor(f"{LAYER}.post_per_layer_input_norm.weight", (f"{_EMBEDDING}.norm.scale",)),
)


def _kinds(num_layers: int, pattern: int) -> list[str]:
    # The last layer always has full attention.
    return [*layer_types(num_layers, pattern)[:-1], _FULL]


def _pattern_from_hf(kinds: Sequence[str] | None) -> int:
    if kinds is None:
        return 6
    # transformers gives the last layer full attention, whatever the file says.
    seen = [*kinds[:-1], _FULL]
    first = seen.index(_FULL) + 1
    for pattern in (6, first):
        if seen == _kinds(len(seen), pattern):
            return pattern
    raise ValueError("layer_types is not supported, only one full_attention layer after every n sliding_attention are")


def _global_heads_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the heads of layers without a window, which transformers writes for each layer since 5.20."""
    per_layer = hf.get("per_layer_config")
    shared_values = bool(hf.get("attention_k_eq_v"))
    if per_layer is None:
        heads = hf.get("num_global_key_value_heads") if shared_values else None
        return {"global_head_dim": hf.get("global_head_dim") or 512, "num_global_kv_heads": heads}
    layers = hf.get("num_hidden_layers") or 30
    full = {n for n, kind in enumerate(_kinds(layers, _pattern_from_hf(hf.get("layer_types")))) if kind == _FULL}
    entries = list(per_layer.values())
    # Numbers are written with leading zeros, such as "05".
    if {int(number) for number in per_layer} != full or any(
        entry != entries[0] or entry.keys() - {"head_dim", "num_key_value_heads"} for entry in entries
    ):
        raise ValueError("per_layer_config is not supported, except for equal heads of all full_attention layers")
    size = entries[0].get("head_dim", hf.get("head_dim") or 256)
    return {"global_head_dim": size, "num_global_kv_heads": entries[0].get("num_key_value_heads")}


def _experts_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    # A model without experts may have numbers of experts in its file.
    if not hf.get("enable_moe_block"):
        return {}
    if absent := [name for name in _EXPERT_FIELDS if hf.get(name) is None]:
        raise ValueError(f"enable_moe_block=True without {', '.join(absent)}")
    return {setting: hf[name] for name, setting in _EXPERT_FIELDS.items()}


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    embedding_dim = hf.get("hidden_size_per_layer_input", 256) or None
    vocab_sizes = {hf.get(name, 262144) for name in ("vocab_size", "vocab_size_per_layer_input")}
    if embedding_dim and len(vocab_sizes) > 1:
        raise ValueError("vocab_size_per_layer_input must equal vocab_size")
    if hf.get("use_bidirectional_attention") == "all":
        raise ValueError("use_bidirectional_attention='all' is not supported, only causal attention is")
    default = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    block = dict((hf.get("rope_parameters") or {}).get(_FULL) or default)
    kind, fraction = block.get("rope_type", "default"), block.pop("partial_rotary_factor", None)
    if kind == "proportional":
        block["rope_type"] = "linear" if block.get("factor", 1.0) != 1.0 else "default"
    elif kind != "default":
        raise ValueError(f"rope_type={kind!r} of {_FULL} is not supported, only 'proportional' and 'default' are")
    return {
        "rope": parse_rope(block, float(block.get("rope_theta") or 1_000_000.0)),
        "partial_rotary_factor": 1.0 if kind == "default" or fraction is None else float(fraction),
        "rope_local_base_freq": local_theta_from_hf(hf, 10_000.0),
        "final_logit_softcapping": hf.get("final_logit_softcapping"),
        "sliding_window_pattern": _pattern_from_hf(hf.get("layer_types")),
        "layer_embedding_dim": embedding_dim,
        **_global_heads_from_hf(hf),
        **_experts_from_hf(hf),
    }


def _to_hf(config: "Gemma4Config") -> dict[str, Any]:
    if not isinstance(config.rope, DefaultRope):
        raise ValueError(f"rope: {config.rope.type} has no place in the format; only default and linear have one")
    if not config.attention_k_eq_v and config.num_global_kv_heads not in (None, config.num_kv_heads):
        raise ValueError("num_global_kv_heads has no place in the format without attention_k_eq_v: true")
    full = {**config.rope.to_hf(), "rope_type": "proportional", "rope_theta": config.rope.theta}
    return {
        "rope_parameters": {
            _FULL: {**full, "partial_rotary_factor": config.partial_rotary_factor},
            "sliding_attention": {"rope_type": "default", "rope_theta": config.rope_local_base_freq},
        },
        "final_logit_softcapping": config.final_logit_softcapping,
        "layer_types": _kinds(config.num_layers, config.sliding_window_pattern),
        "global_head_dim": config.global_head_dim,
        "num_global_key_value_heads": config.num_global_kv_heads,
        "hidden_size_per_layer_input": config.layer_embedding_dim or 0,
        "enable_moe_block": bool(config.n_routed_experts),
        **{name: getattr(config, setting) or None for name, setting in _EXPERT_FIELDS.items()},
        "use_bidirectional_attention": None,
    }


class Gemma4Config(OptionalExpertsConfig):
    """The fourth Gemma family, without vision; the defaults are Gemma 4 31B."""

    newer_fields: ClassVar[frozenset[str]] = OptionalExpertsConfig.newer_fields | {
        *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_dim", "expert_kernel"),
        *("lbl_coef", "lbl_over", "selection_bias_rate", "rzl_coef"),
        *("layer_embedding_dim", "num_kv_shared_layers", "use_double_wide_mlp"),
    }

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="gemma4_text",
        architecture="Gemma4ForCausalLM",
        fields=(
            *hf_fields(
                activation="hidden_activation",
                hidden_size=2304,
                intermediate_size=9216,
                num_hidden_layers=30,
                num_attention_heads=8,
                max_position_embeddings=131072,
                hidden_activation="gelu_pytorch_tanh",
                tie_word_embeddings=True,
            ),
            HfField("num_key_value_heads", "num_kv_heads", 4),
            HfField("head_dim", "head_dim", 256),
            HfField("attention_k_eq_v", "attention_k_eq_v", False),
            HfField("sliding_window", "sliding_window", 512),
            HfField("num_kv_shared_layers", "num_kv_shared_layers", 0),
            HfField("use_double_wide_mlp", "use_double_wide_mlp", False),
        ),
        tensors=(
            *EMBEDDING,
            HEAD,
            *FOUR_NORMS,
            *ATTENTION,
            *QK_NORM,
            *MLP,
            *_EXPERTS,
            *_LAYER_EMBEDDING,
            HfTensor(f"{LAYER}.layer_scalar", (f"{BLOCK}.output_scale",)),
        ),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed={"attention_bias": False},
        inert={"attention_dropout": 0.0},
        vocab_sizes=("vocab_size_per_layer_input",),
        read_only=("per_layer_config",),
        computed_from_hf=_from_hf,
        computed_to_hf=_to_hf,
        tied=TIED,
    )

    type: Literal["gemma4"] = "gemma4"
    """Name of the model family."""
    seq_len: int = Field(default=262144, gt=0)
    """Maximum sequence length in tokens."""
    hidden_dim: int = Field(default=5376, gt=0)
    """Width of the residual stream."""
    intermediate_dim: int = Field(default=21504, gt=0)
    """Width of the MLP that processes every token."""
    moe_intermediate_dim: int | None = Field(default=None, gt=0)
    """Width of each expert. Required if there are experts."""
    num_layers: int = Field(default=60, gt=0)
    """Number of blocks."""
    num_heads: int = Field(default=32, gt=0)
    """Number of query heads."""
    num_kv_heads: int = Field(default=16, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads."""
    head_dim: int | None = Field(default=256, gt=0, multiple_of=2)
    """Number of dimensions per head of layers with a window. `null`: hidden_dim / num_heads."""
    global_head_dim: int = Field(default=512, gt=0, multiple_of=2)
    """Number of dimensions per head of the other layers."""
    num_global_kv_heads: int | None = Field(default=4, gt=0)
    """Number of key and value heads of layers without a window. `null`: num_kv_heads."""
    attention_k_eq_v: bool = True
    """In layers without a window, values are the results of the map of keys, before its norm and rotation."""
    activation_function: ActivationName = "gelu_new"
    """Activation of the MLP's gate: gelu (exact), gelu_new (its tanh approximation), quick_gelu, relu, relu2 (its
    square), silu or tanh."""
    use_double_wide_mlp: bool = False
    """Layers that use the keys and values of an earlier layer have an MLP of twice the width."""
    layer_embedding_dim: int | None = Field(default=None, gt=0)
    """Size of the token embedding that each layer has of its own. `null`: layers have none."""
    num_kv_shared_layers: int = Field(default=0, ge=0)
    """Number of last layers that use the keys and values of the last earlier layer of their kind, with or without a
    window."""
    layer_norm_epsilon: float = Field(default=1e-6, gt=0)
    """Epsilon that is added to the mean square in the norms."""
    tie_word_embeddings: bool = True
    """Ties the weights of the output layer to the token embedding."""
    final_logit_softcapping: float | None = Field(default=30.0, gt=0)
    """The cap c that bounds the logits l to c * tanh(l / c); `null`: no bound."""
    sliding_window: int = Field(default=1024, gt=0)
    """Number of positions that a layer with a window can see, including the current one."""
    sliding_window_pattern: int = Field(default=6, gt=0)
    """Every n-th layer, and the last one, attend to all positions. The other layers have a window."""
    rope: AnyRope = DefaultRope(theta=1_000_000.0)
    """Rotary position embedding of the layers without a window."""
    partial_rotary_factor: float = Field(default=0.25, gt=0, le=1)
    """Fraction of the pairs of dimensions of a head that is rotated in layers without a window, counted from the
    shortest wavelength."""
    rope_local_base_freq: float = Field(default=10_000.0, gt=1)
    """RoPE theta of the layers with a window. Their positions are never scaled."""

    @model_validator(mode="after")
    def _check_global_heads(self) -> "Gemma4Config":
        if self.num_heads % (self.num_global_kv_heads or 1):
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_global_kv_heads={self.num_global_kv_heads}"
            )
        return self

    @model_validator(mode="after")
    def _check_shared_keys(self) -> "Gemma4Config":
        kinds = _kinds(self.num_layers, self.sliding_window_pattern)
        if missing := {*kinds} - {*kinds[: self._layers_with_keys]}:
            raise ValueError(
                f"num_kv_shared_layers={self.num_kv_shared_layers} of {self.num_layers} layers leaves no layer of the "
                f"kind {missing.pop()} with keys that the others could use"
            )
        return self

    @model_validator(mode="after")
    def _check_experts_have_a_width(self) -> "Gemma4Config":
        if self.n_routed_experts and self.moe_intermediate_dim is None:
            raise ValueError(f"n_routed_experts={self.n_routed_experts} needs moe_intermediate_dim, their width")
        return self

    @model_validator(mode="after")
    def _check_rope_fits(self) -> "Gemma4Config":
        self.rope.check_head_size(self.global_head_dim)
        return self

    @property
    def _layers_with_keys(self) -> int:
        return max(0, self.num_layers - self.num_kv_shared_layers)

    def file_table(self) -> HfFamily:
        # Published files hold keys and values of all layers.
        family = super().file_table()
        unused = "|".join(map(str, range(self._layers_with_keys, self.num_layers)))
        ignored = rf"layers\.({unused})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*"
        return replace(family, ignored=ignored) if unused else family

    def block_mlp_spec(self, width: int) -> MlpSpec | MoeSpec:
        """Spec of the second part of a layer, with an MLP of this width."""
        if not self.n_routed_experts or self.moe_intermediate_dim is None:
            return replace(self.mlp_spec(), hidden_dim=width)
        norm = self.norm_spec()
        experts = self.moe_spec(
            self.moe_intermediate_dim,
            router=RouterSpec(expert_scale=True),
            shared=SharedExpertSpec(width),
        )
        return replace(experts, branch_norm=BranchNormSpec(replace(norm, factor=self.hidden_dim**-0.5), norm))

    def _layer_embedding(self, vocab_size: int) -> LayerEmbeddingSpec | None:
        if self.layer_embedding_dim is None:
            return None
        return LayerEmbeddingSpec(vocab_size, self.layer_embedding_dim, self.norm_spec(), self.activation_function)

    def spec(self, vocab_size: int) -> DecoderSpec:
        norm = self.norm_spec()
        local = replace(
            self.attention_spec(),
            positions=DefaultRope(theta=self.rope_local_base_freq).spec(self.seq_len),
            qk_norm=QkNormSpec(norm),
            value_norm=replace(norm, scale=False),
            window=self.sliding_window,
            scores=self.score_spec(1.0),
        )
        full = replace(
            local,
            head_dim=self.global_head_dim,
            num_kv_heads=self.num_global_kv_heads or self.num_kv_heads,
            values_are_keys=self.attention_k_eq_v,
            positions=replace(self.rope.spec(self.seq_len, self.partial_rotary_factor), over_head=True),
            window=None,
        )
        kinds, with_keys = _kinds(self.num_layers, self.sliding_window_pattern), self._layers_with_keys
        block = BlockSpec(
            local,
            self.block_mlp_spec(self.intermediate_dim),
            pre_norm=norm,
            post_norm=norm,
            layer_embedding=self._layer_embedding(vocab_size),
            output_scale=True,
        )
        wide = self.block_mlp_spec(self.intermediate_dim * (2 if self.use_double_wide_mlp else 1))

        def make_block(number: int, kind: str) -> BlockSpec:
            mixer = full if kind == _FULL else local
            if with_keys == self.num_layers:
                return replace(block, mixer=mixer)
            last_with_keys = max(layer for layer in range(with_keys) if kinds[layer] == kind)
            has_keys = number < with_keys
            mixer = replace(mixer, sharing=KeySharingSpec(last_with_keys, has_keys))
            return replace(block, mixer=mixer, mlp=block.mlp if has_keys else wide)

        return self.decoder_spec(
            vocab_size,
            tuple(make_block(number, kind) for number, kind in enumerate(kinds)),
            prefix=with_keys if with_keys < self.num_layers else 0,
            embedding=EmbeddingSpec(scale=math.sqrt(self.hidden_dim)),
            softcap=self.final_logit_softcapping,
        )
