"""Gemma 1, 2 and 3 (Gemma team 2024, 2025), text only: norms with gains around 1, scaled embeddings, a gated MLP with
GELU. Gemma 2 and 3 have norms before and after each sublayer, and sliding windows in most layers.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from lm_trainer.models.base import ActivationName
from lm_trainer.models.hf_table import HfFamily, HfField
from lm_trainer.models.rope import AnyRope, DefaultRope, local_theta_from_hf, rope_from_hf, ropes_to_hf
from lm_trainer.models.rotary import (
    ACTIVATIONS,
    ATTENTION,
    EMBEDDING,
    HEAD,
    MLP,
    PRE_NORMS,
    QK_NORM,
    TIED,
    RotaryConfig,
    common_fields_to_hf,
    heads_from_hf,
    hf_fields,
    layer_norm_tensors,
    layer_types,
    pattern_from_hf,
)
from lm_trainer.nn.rope_spec import RopeSpec
from lm_trainer.nn.spec import BlockSpec, DecoderSpec, EmbeddingSpec, NormSpec, QkNormSpec

# `post_attention_layernorm` is the norm after attention here. In Llama's files it is the norm before the MLP.
FOUR_NORMS = layer_norm_tensors(
    attention_pre_norm="input_layernorm",
    attention_post_norm="post_attention_layernorm",
    mlp_pre_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
_FIXED = {"attention_bias": False, "use_bidirectional_attention": False}
_INERT = {"attention_dropout": 0.0}
_SHARED = {"hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "tie_word_embeddings": True}
_LEGACY_GELU = {"gelu": "gelu_new"}
"""The first Gemma files contain gelu but mean its tanh approximation, as in transformers."""
_CAPS = (
    HfField("query_pre_attn_scalar", "query_pre_attn_scalar", 256),
    HfField("sliding_window", "sliding_window", 4096),
)


class _GemmaConfig(RotaryConfig):
    """Settings that all generations of Gemma share."""

    seq_len: int = Field(default=8192, gt=0)
    """Maximum sequence length in tokens."""
    head_dim: int | None = Field(default=256, gt=0, multiple_of=2)
    """Number of dimensions per head. `null`: hidden_dim / num_heads."""
    activation_function: ActivationName = "gelu_new"
    """Activation of the MLP's gate: gelu (exact), gelu_new (its tanh approximation), quick_gelu, relu, relu2 (its
    square), silu or tanh."""
    layer_norm_epsilon: float = Field(default=1e-6, gt=0)
    """Epsilon that is added to the mean square in the norms."""
    tie_word_embeddings: bool = True
    """Ties the weights of the output layer to the token embedding."""

    def norm_spec(self) -> NormSpec:
        # Both the files and our parameters store gains minus 1, so no constant is added or subtracted in the
        # conversion.
        return replace(super().norm_spec(), unit_offset=True)

    def embedding_spec(self) -> EmbeddingSpec:
        """Token embeddings multiplied by sqrt(hidden_dim)."""
        return EmbeddingSpec(scale=math.sqrt(self.hidden_dim))


def _gemma_to_hf(config: "GemmaConfig") -> dict[str, Any]:
    if config.activation_function == "gelu":
        raise ValueError("transformers takes hidden_act: gelu of a gemma model for its tanh approximation")
    return common_fields_to_hf(config)


class GemmaConfig(_GemmaConfig):
    """The first Gemma family; the defaults are Gemma 7B."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="gemma",
        reference="google/gemma-2b",
        architecture="GemmaForCausalLM",
        fields=hf_fields(
            read={**ACTIVATIONS, **_LEGACY_GELU},
            **_SHARED,
            hidden_size=3072,
            intermediate_size=24576,
            num_hidden_layers=28,
            num_attention_heads=16,
        ),
        tensors=(*EMBEDDING, HEAD, *PRE_NORMS, *ATTENTION, *MLP),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed=_FIXED,
        inert=_INERT,
        computed_from_hf=lambda hf: {"rope": rope_from_hf(hf), **heads_from_hf(hf, kv_heads=16, head_dim=256)},
        computed_to_hf=_gemma_to_hf,
        tied=TIED,
    )

    type: Literal["gemma"] = "gemma"
    """Name of the model family."""
    hidden_dim: int = Field(default=3072, gt=0)
    """Width of the residual stream."""
    intermediate_dim: int = Field(default=24576, gt=0)
    """Width of the MLP."""
    num_layers: int = Field(default=28, gt=0)
    """Number of blocks."""
    num_heads: int = Field(default=16, gt=0)
    """Number of query heads."""
    num_kv_heads: int = Field(default=16, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads."""

    def spec(self, vocab_size: int) -> DecoderSpec:
        block = BlockSpec(self.attention_spec(), self.mlp_spec(), pre_norm=self.norm_spec())
        return self.decoder_spec(vocab_size, (block,) * self.num_layers, embedding=self.embedding_spec())


def _from_hf(hf: Mapping[str, Any], pattern: int) -> dict[str, Any]:
    return {"sliding_window_pattern": pattern_from_hf(hf, pattern), **heads_from_hf(hf, kv_heads=4, head_dim=256)}


def _gemma2_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rope": rope_from_hf(hf),
        # A null in the file means no cap, and an absent key means the default.
        "attn_logit_softcapping": hf.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": hf.get("final_logit_softcapping", 30.0),
        **_from_hf(hf, 2),
    }


def _gemma3_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rope": rope_from_hf(hf, 1_000_000.0, layers="full_attention"),
        "rope_local_base_freq": local_theta_from_hf(hf, 10_000.0),
        "final_logit_softcapping": hf.get("final_logit_softcapping"),
        **_from_hf(hf, 6),
    }


def _to_hf(config: "_WindowedGemmaConfig") -> dict[str, Any]:
    return {
        "final_logit_softcapping": config.final_logit_softcapping,
        "layer_types": layer_types(config.num_layers, config.sliding_window_pattern),
        **common_fields_to_hf(config),
    }


def _gemma2_to_hf(config: "Gemma2Config") -> dict[str, Any]:
    return {**_to_hf(config), "attn_logit_softcapping": config.attn_logit_softcapping}


def _gemma3_to_hf(config: "Gemma3Config") -> dict[str, Any]:
    return {
        **_to_hf(config),
        **ropes_to_hf(config.rope, config.rope_local_base_freq),
        "sliding_window_pattern": config.sliding_window_pattern,
    }


class _WindowedGemmaConfig(_GemmaConfig):
    """Settings that the second and third generation of Gemma share."""

    hidden_dim: int = Field(default=2304, gt=0)
    """Width of the residual stream."""
    intermediate_dim: int = Field(default=9216, gt=0)
    """Width of the MLP."""
    num_layers: int = Field(default=26, gt=0)
    """Number of blocks."""
    num_heads: int = Field(default=8, gt=0)
    """Number of query heads."""
    num_kv_heads: int = Field(default=4, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads."""
    query_pre_attn_scalar: int = Field(default=256, gt=0)
    """Attention scores are divided by the square root of this number."""
    final_logit_softcapping: float | None = Field(default=None, gt=0)
    """The cap c that bounds the logits l to c * tanh(l / c); `null`: no bound."""
    sliding_window: int = Field(default=4096, gt=0)
    """Number of positions that a layer with a window can see, including the current one."""
    sliding_window_pattern: int = Field(default=6, gt=0)
    """Every n-th layer attends to all positions. The other layers have a window."""

    def block_spec(self, softcap: float | None = None) -> BlockSpec:
        """Builds the spec of a layer with full attention, whose scores are bounded by `softcap`."""
        # This is not the head size, which is different in some sizes of Gemma 2.
        scores = replace(self.score_spec(self.query_pre_attn_scalar**-0.5), softcap=softcap)
        attention = replace(self.attention_spec(), scores=scores)
        return BlockSpec(attention, self.mlp_spec(), pre_norm=self.norm_spec(), post_norm=self.norm_spec())

    def alternating_decoder_spec(self, vocab_size: int, full: BlockSpec, local: BlockSpec) -> DecoderSpec:
        """Builds the spec of a model with both kinds of layers. `local` gets the window."""
        local = replace(local, mixer=replace(local.attention, window=self.sliding_window))
        kinds = layer_types(self.num_layers, self.sliding_window_pattern)
        blocks = tuple(full if kind == "full_attention" else local for kind in kinds)
        return self.decoder_spec(
            vocab_size, blocks, embedding=self.embedding_spec(), softcap=self.final_logit_softcapping
        )


_WINDOWED = {
    **_SHARED,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
# Name of the activation in files of these generations.
_WINDOWED["hidden_activation"] = _WINDOWED.pop("hidden_act")


class Gemma2Config(_WindowedGemmaConfig):
    """The second Gemma family; the defaults are Gemma 2 2B."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="gemma2",
        reference="google/gemma-2-2b",
        architecture="Gemma2ForCausalLM",
        fields=(*hf_fields(activation="hidden_activation", **_WINDOWED), *_CAPS),
        tensors=(*EMBEDDING, HEAD, *FOUR_NORMS, *ATTENTION, *MLP),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed=_FIXED,
        inert=_INERT,
        computed_from_hf=_gemma2_from_hf,
        computed_to_hf=_gemma2_to_hf,
        # Published files also have a name of the first generation, which transformers does not read.
        read_only=("hidden_act",),
        tied=TIED,
    )

    type: Literal["gemma2"] = "gemma2"
    """Name of the model family."""
    attn_logit_softcapping: float | None = Field(default=50.0, gt=0)
    """The cap c that bounds attention scores s to c * tanh(s / c); `null`: no bound."""
    final_logit_softcapping: float | None = Field(default=30.0, gt=0)
    """The cap c that bounds the logits l to c * tanh(l / c); `null`: no bound."""
    sliding_window_pattern: int = Field(default=2, gt=0)
    """Every n-th layer attends to all positions. The other layers have a window."""

    def spec(self, vocab_size: int) -> DecoderSpec:
        block = self.block_spec(self.attn_logit_softcapping)
        return self.alternating_decoder_spec(vocab_size, block, block)


class Gemma3Config(_WindowedGemmaConfig):
    """The third Gemma family, without vision; the defaults are the defaults of transformers."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="gemma3_text",
        reference="google/gemma-3-1b-pt",
        architecture="Gemma3ForCausalLM",
        fields=(
            *hf_fields(activation="hidden_activation", **{**_WINDOWED, "max_position_embeddings": 131072}),
            *_CAPS,
        ),
        tensors=(*EMBEDDING, HEAD, *FOUR_NORMS, *ATTENTION, *QK_NORM, *MLP),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        # Gemma 3 inherits this field from Gemma 2, but normalizes queries and keys instead of capping scores.
        fixed={**_FIXED, "attn_logit_softcapping": None},
        inert=_INERT,
        computed_from_hf=_gemma3_from_hf,
        computed_to_hf=_gemma3_to_hf,
        read_only=("hidden_act",),
        tied=TIED,
    )

    type: Literal["gemma3"] = "gemma3"
    """Name of the model family."""
    seq_len: int = Field(default=131072, gt=0)
    """Maximum sequence length in tokens."""
    rope: AnyRope = DefaultRope(theta=1_000_000.0)
    """Rotary position embedding of the layers with full attention."""
    rope_local_base_freq: float = Field(default=10_000.0, gt=1)
    """RoPE theta of the layers with a window. Their positions are never scaled."""

    def spec(self, vocab_size: int) -> DecoderSpec:
        block = self.block_spec()
        full = replace(block, mixer=replace(block.attention, qk_norm=QkNormSpec(self.norm_spec())))
        local = replace(full, mixer=replace(full.attention, positions=RopeSpec(self.rope_local_base_freq)))
        return self.alternating_decoder_spec(vocab_size, full, local)
