"""Qwen2, Qwen2.5 and Qwen3 (Yang et al. 2024, 2025): rotary positions, RMSNorm before each sublayer, gated MLP.

Qwen2 has biases on queries, keys and values. Qwen3 instead normalizes the heads of queries and keys.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lm_trainer.models.hf_table import HfFamily, HfField
from lm_trainer.models.rope import rope_from_hf
from lm_trainer.models.rotary import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    MLP,
    PRE_NORMS,
    QK_NORM,
    TIED,
    RotaryConfig,
    check_layer_types,
    common_fields_to_hf,
    heads_from_hf,
    hf_fields,
)
from lm_trainer.nn.spec import AttentionSpec, BlockSpec, DecoderSpec, QkNormSpec

_WINDOW = 4096


class _QwenConfig(RotaryConfig):
    """Settings that both generations share."""

    seq_len: int = Field(default=32768, gt=0)
    """Maximum sequence length in tokens."""
    intermediate_dim: int = Field(default=22016, gt=0)
    """Width of the MLP."""
    use_sliding_window: bool = False
    """Limits attention in layers with index `max_window_layers` or higher to `sliding_window` positions."""
    sliding_window: int | None = Field(default=None, gt=0)
    """Number of positions that these layers can see, including the current one. Unset: 4096."""
    max_window_layers: int = Field(default=28, ge=0)
    """Number of initial layers with full attention."""

    @model_validator(mode="after")
    def _check_window_is_used(self) -> "_QwenConfig":
        if self.sliding_window is not None and not self.use_sliding_window:
            raise ValueError("sliding_window has no effect without use_sliding_window: true; set that, or remove it")
        return self

    def window(self, layer: int) -> int | None:
        """Returns the window of one layer; None if it has full attention."""
        used = self.use_sliding_window and layer >= self.max_window_layers
        return (self.sliding_window or _WINDOW) if used else None

    def windowed_decoder_spec(self, vocab_size: int, attention: AttentionSpec) -> DecoderSpec:
        """Builds the spec of the model with the window of each layer."""
        block = BlockSpec(attention, self.mlp_spec(), pre_norm=self.norm_spec())
        layers = range(self.num_layers)
        return self.decoder_spec(
            vocab_size, tuple(replace(block, mixer=replace(attention, window=self.window(i))) for i in layers)
        )


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    used = bool(hf.get("use_sliding_window", False))
    first = 28 if hf.get("max_window_layers") is None else hf["max_window_layers"]
    check_layer_types(hf, lambda layer: used and layer >= first)
    window = hf.get("sliding_window", _WINDOW) if used else None
    return {
        # A window of null in the file means no window.
        "use_sliding_window": used and window is not None,
        "sliding_window": window,
        "rope": rope_from_hf(hf),
        **heads_from_hf(hf, kv_heads=32),
    }


def _to_hf(config: _QwenConfig) -> dict[str, Any]:
    window = (config.sliding_window or _WINDOW) if config.use_sliding_window else None
    return {"use_sliding_window": config.use_sliding_window, "sliding_window": window, **common_fields_to_hf(config)}


_FIELDS = (
    *hf_fields(intermediate_size=22016, max_position_embeddings=32768),
    HfField("max_window_layers", "max_window_layers", 28),
)


def _qwen3_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    # If the key is absent, transformers uses 128, and not hidden_size / num_attention_heads.
    return {**_from_hf(hf), **heads_from_hf(hf, kv_heads=32, head_dim=128)}


class Qwen2Config(_QwenConfig):
    """The Qwen2 and Qwen2.5 family; the defaults are the defaults of transformers."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="qwen2",
        reference="Qwen/Qwen2.5-0.5B",
        architecture="Qwen2ForCausalLM",
        fields=_FIELDS,
        tensors=(*EMBEDDING, HEAD, *PRE_NORMS, *ATTENTION, *MLP),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed={},
        inert={"attention_dropout": 0.0},
        read_only=("layer_types",),
        computed_from_hf=_from_hf,
        computed_to_hf=_to_hf,
        ignored=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        tied=TIED,
    )

    type: Literal["qwen2", "qwen"] = "qwen2"
    """Name of the model family; `qwen` is another name for it."""

    def spec(self, vocab_size: int) -> DecoderSpec:
        return self.windowed_decoder_spec(vocab_size, replace(self.attention_spec(), bias=True))


class Qwen3Config(_QwenConfig):
    """The Qwen3 family without experts; the defaults are the defaults of transformers."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="qwen3",
        reference="Qwen/Qwen3-0.6B-Base",
        architecture="Qwen3ForCausalLM",
        fields=_FIELDS,
        tensors=(*EMBEDDING, HEAD, *PRE_NORMS, *ATTENTION, *QK_NORM, *MLP),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed={"attention_bias": False},
        inert={"attention_dropout": 0.0},
        read_only=("layer_types",),
        computed_from_hf=_qwen3_from_hf,
        computed_to_hf=_to_hf,
        tied=TIED,
    )

    type: Literal["qwen3"] = "qwen3"
    """Name of the model family."""
    head_dim: int | None = Field(default=128, gt=0, multiple_of=2)
    """Number of dimensions per head. `null`: hidden_dim / num_heads."""

    def spec(self, vocab_size: int) -> DecoderSpec:
        return self.windowed_decoder_spec(
            vocab_size, replace(self.attention_spec(), qk_norm=QkNormSpec(self.norm_spec()))
        )
