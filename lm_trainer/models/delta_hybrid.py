"""Decoders with Gated DeltaNet in most layers and gated attention in every n-th layer, as in Qwen3-Next and Qwen3.5."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field, model_validator

from lm_trainer.models.hf_table import HfField, HfTensor, linear_tensors
from lm_trainer.models.rope import AnyRope, DefaultRope, fraction_from_hf, fraction_to_hf, rope_from_hf
from lm_trainer.models.rotary import (
    BLOCK,
    EMBEDDING,
    HEAD,
    LAYER,
    PRE_NORMS,
    QK_NORM,
    RotaryConfig,
    common_fields_to_hf,
    heads_from_hf,
)
from lm_trainer.nn.mixer_spec import DeltaSpec
from lm_trainer.nn.spec import AttentionSpec, NormSpec, QkNormSpec

_FRACTION, _INTERVAL = 0.25, 4
DELTA = f"{LAYER}.linear_attn"
"""Name of a layer's Gated DeltaNet in the file."""

DELTA_FIELDS = (
    HfField("linear_num_value_heads", "linear_num_value_heads", 32),
    HfField("linear_num_key_heads", "linear_num_key_heads", 16),
    HfField("linear_key_head_dim", "linear_key_head_dim", 128),
    HfField("linear_value_head_dim", "linear_value_head_dim", 128),
    HfField("linear_conv_kernel_dim", "linear_conv_width", 4),
)
_DELTA_TENSORS = (
    HfTensor(f"{DELTA}.conv1d.weight", tuple(f"{BLOCK}.attention.{name}_conv.weight" for name in "qkv"), reversed=True),
    HfTensor(f"{DELTA}.dt_bias", (f"{BLOCK}.attention.dt_bias",)),
    HfTensor(f"{DELTA}.A_log", (f"{BLOCK}.attention.a_log",)),
    HfTensor(f"{DELTA}.norm.weight", (f"{BLOCK}.attention.norm.scale",)),
    *linear_tensors(f"{DELTA}.out_proj", f"{BLOCK}.attention.readout"),
)
# In the file, each head of queries is followed by its gate.
_GATED_ATTENTION = (
    *linear_tensors(f"{LAYER}.self_attn.q_proj", f"{BLOCK}.attention.q", f"{BLOCK}.attention.gate", interleaved=True),
    *linear_tensors(f"{LAYER}.self_attn.k_proj", f"{BLOCK}.attention.k"),
    *linear_tensors(f"{LAYER}.self_attn.v_proj", f"{BLOCK}.attention.v"),
    *linear_tensors(f"{LAYER}.self_attn.o_proj", f"{BLOCK}.attention.out"),
)
MULTI_TOKEN = r"mtp\..*"
"""Tensors of the module that predicts several tokens, which transformers leaves out too."""


def hybrid_tensors(*linear_maps: HfTensor) -> tuple[HfTensor, ...]:
    """Lists all tensors but the MLPs'. The families differ in the linear maps of Gated DeltaNet's input."""
    shared = (*EMBEDDING, HEAD, *PRE_NORMS, *_GATED_ATTENTION, *QK_NORM)
    return (*shared, *linear_maps, *_DELTA_TENSORS)


class DeltaHybridConfig(RotaryConfig):
    """Settings of a decoder with Gated DeltaNet in most layers."""

    activation_function: ClassVar[str] = "silu"  # pyright: ignore[reportIncompatibleVariableOverride]
    separate_maps: ClassVar[bool] = False
    """As in `DeltaSpec`."""

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

    @model_validator(mode="after")
    def _check_heads_divide(self) -> "DeltaHybridConfig":
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
            separate_maps=self.separate_maps,
        )
        kinds = _layer_types(self.num_layers, self.full_attention_interval)
        return [attention if kind == "full_attention" else delta for kind in kinds]


def hybrid_from_hf(hf: Mapping[str, Any], *, kv_heads: int) -> dict[str, Any]:
    """Reads the settings that are not copies of a field. `kv_heads` is transformers' default of an absent key."""
    return {
        "full_attention_interval": _interval_from_hf(hf),
        "rope": rope_from_hf(hf),
        "partial_rotary_factor": fraction_from_hf(hf, _FRACTION),
        **heads_from_hf(hf, kv_heads=kv_heads, head_dim=256),
    }


def hybrid_to_hf(config: DeltaHybridConfig) -> dict[str, Any]:
    """Returns the fields of config.json that are not copies of a setting."""
    return {
        "layer_types": _layer_types(config.num_layers, config.full_attention_interval),
        "full_attention_interval": config.full_attention_interval,
        **fraction_to_hf(common_fields_to_hf(config), config.partial_rotary_factor),
    }


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
