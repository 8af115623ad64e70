"""OLMo 2 and OLMo 3 (OLMo team 2024, 2025): norms only after each sublayer, and over all heads of queries and keys.

In OLMo 3, every fourth layer has full attention and scaled positions. All other layers have sliding windows.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from lm_trainer.models.hf_table import HfFamily
from lm_trainer.models.rope import AnyRope, DefaultRope, local_theta_from_hf, rope_from_hf, ropes_to_hf
from lm_trainer.models.rotary import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    MLP,
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
from lm_trainer.nn.spec import BlockSpec, DecoderSpec, QkNormSpec

_TENSORS = (
    *EMBEDDING,
    HEAD,
    *layer_norm_tensors(attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm"),
    *ATTENTION,
    *QK_NORM,
    *MLP,
)
_FIELDS = hf_fields(rms_norm_eps=1e-5)
_FIXED, _INERT = {"attention_bias": False}, {"attention_dropout": 0.0}
_THETA, _PATTERN = 500_000.0, 4


def _olmo2_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope": rope_from_hf(hf), **heads_from_hf(hf, kv_heads=None)}


def _olmo3_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rope": rope_from_hf(hf, _THETA, layers="full_attention"),
        # A single theta in the file also applies to the layers with a window.
        "rope_local_base_freq": local_theta_from_hf(hf, float(hf.get("rope_theta") or _THETA)),
        "sliding_window": hf.get("sliding_window", 4096),
        "sliding_window_pattern": pattern_from_hf(hf, _PATTERN),
        **heads_from_hf(hf, kv_heads=None),
    }


def _olmo3_to_hf(config: "Olmo3Config") -> dict[str, Any]:
    return {
        **common_fields_to_hf(config),
        **ropes_to_hf(config.rope, config.rope_local_base_freq),
        "sliding_window": config.sliding_window,
        "layer_types": layer_types(config.num_layers, config.sliding_window_pattern),
    }


class _OlmoConfig(RotaryConfig):
    """Settings and block that both generations share."""

    def block_spec(self, *, window: int | None = None, rope: RopeSpec | None = None) -> BlockSpec:
        """Builds the spec of one layer, optionally with a window and other rotations."""
        plain = self.attention_spec()
        attention = replace(
            plain,
            qk_norm=QkNormSpec(self.norm_spec(), over="heads"),
            window=window,
            positions=rope or plain.positions,
        )
        # There is no pre-norm: attention and MLP read the unnormalized residual stream.
        return BlockSpec(attention, self.mlp_spec(), post_norm=self.norm_spec())


class Olmo2Config(_OlmoConfig):
    """The OLMo 2 family; the defaults are the defaults of transformers."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="olmo2",
        reference="allenai/OLMo-2-1124-7B",
        architecture="Olmo2ForCausalLM",
        fields=_FIELDS,
        tensors=_TENSORS,
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed=_FIXED,
        inert=_INERT,
        computed_from_hf=_olmo2_from_hf,
        computed_to_hf=common_fields_to_hf,
        tied=TIED,
    )

    type: Literal["olmo2"] = "olmo2"
    """Name of the model family."""

    def spec(self, vocab_size: int) -> DecoderSpec:
        return self.decoder_spec(vocab_size, (self.block_spec(),) * self.num_layers)


class Olmo3Config(_OlmoConfig):
    """The OLMo 3 family; the defaults are the defaults of transformers."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="olmo3",
        reference="allenai/Olmo-3-1025-7B",
        architecture="Olmo3ForCausalLM",
        fields=_FIELDS,
        tensors=_TENSORS,
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed=_FIXED,
        inert=_INERT,
        computed_from_hf=_olmo3_from_hf,
        computed_to_hf=_olmo3_to_hf,
        tied=TIED,
    )

    type: Literal["olmo3"] = "olmo3"
    """Name of the model family."""
    rope: AnyRope = DefaultRope(theta=_THETA)
    """Rotary position embedding of the layers with full attention."""
    rope_local_base_freq: float = Field(default=_THETA, gt=1)
    """RoPE theta of the layers with a window. Their positions are never scaled."""
    sliding_window: int = Field(default=4096, gt=0)
    """Number of positions that a layer with a window can see, including the current one."""
    sliding_window_pattern: int = Field(default=_PATTERN, gt=0)
    """Every n-th layer attends to all positions. The other layers have a window."""

    def spec(self, vocab_size: int) -> DecoderSpec:
        full = self.block_spec()
        local = self.block_spec(window=self.sliding_window, rope=RopeSpec(self.rope_local_base_freq))
        kinds = layer_types(self.num_layers, self.sliding_window_pattern)
        return self.decoder_spec(vocab_size, tuple(full if kind == "full_attention" else local for kind in kinds))
