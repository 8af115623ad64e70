"""Settings and tensors that families with multi-head latent attention share."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator

from lm_trainer.models.hf_table import HfField, HfTensor, linear_tensors
from lm_trainer.models.rope import YarnRope, rope_from_hf, rope_to_hf
from lm_trainer.models.rotary import BLOCK, LAYER, RotaryConfig
from lm_trainer.nn.mixer_spec import LatentSpec
from lm_trainer.nn.spec import NormSpec

_LATENT_EPSILON = 1e-6
"""Epsilon of the norms of latents, which no setting of these families changes."""


class LatentConfig(RotaryConfig):
    """Settings of a decoder with multi-head latent attention."""

    # Every head has its own keys and values, and their sizes have settings of their own.
    num_kv_heads: ClassVar[int] = 1  # pyright: ignore[reportIncompatibleVariableOverride]
    head_dim: ClassVar[None] = None  # pyright: ignore[reportIncompatibleVariableOverride]

    kv_lora_rank: int = Field(default=512, gt=0)
    """Size of the latent from which keys and values are computed, and which a cache stores."""
    q_lora_rank: int | None = Field(default=1536, gt=0)
    """Size of the latent from which queries are computed. `null`: queries are computed from the input."""
    qk_nope_head_dim: int = Field(default=128, gt=0)
    """Number of dimensions of a query and key without positions."""
    qk_rope_head_dim: int = Field(default=64, gt=0, multiple_of=2)
    """Number of dimensions of a query and key that are rotated. All heads share this part of the key."""
    v_head_dim: int = Field(default=128, gt=0)
    """Size of the value vectors of a head."""
    use_latent_bias: bool = False
    """Adds biases to the maps from the input to latents, and to the output projection of attention."""
    mscale_all_dim: float = Field(default=0.0, ge=0)
    """With YaRN, attention scores are multiplied by (0.1 * mscale_all_dim * log(factor) + 1) squared."""

    @model_validator(mode="after")
    def _check_heads_fit(self) -> "LatentConfig":
        """Replaces the check of families whose heads divide the hidden dimension."""
        return self

    @model_validator(mode="after")
    def _check_scale_has_yarn(self) -> "LatentConfig":
        if self.mscale_all_dim and not isinstance(self.rope, YarnRope):
            raise ValueError("mscale_all_dim has no effect without rope: {type: yarn}; remove it")
        return self

    @property
    def head_size(self) -> int:
        """Number of dimensions of a head that are rotated."""
        return self.qk_rope_head_dim

    def latent_spec(self, *, interleaved: bool = False) -> LatentSpec:
        """Spec of the mixer. `interleaved` is as in `RopeSpec`."""
        scale = None
        if isinstance(self.rope, YarnRope) and self.mscale_all_dim and self.rope.factor > 1:
            magnitude = 0.1 * self.mscale_all_dim * math.log(self.rope.factor) + 1.0
            scale = magnitude**2 * (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        return LatentSpec(
            num_heads=self.num_heads,
            latent_dim=self.kv_lora_rank,
            plain_dim=self.qk_nope_head_dim,
            rotary_dim=self.qk_rope_head_dim,
            value_dim=self.v_head_dim,
            rope=self.rope.spec(self.seq_len, interleaved=interleaved),
            norm=NormSpec(kind="rms", eps=_LATENT_EPSILON, bias=False),
            query_latent_dim=self.q_lora_rank,
            bias=self.use_latent_bias,
            scores=self.score_spec(scale),
        )


def latent_fields(*, latent: int, plain: int, rotary: int) -> tuple[HfField, ...]:
    """Returns the config.json fields of the mixer, given transformers' default sizes."""
    return (
        HfField("kv_lora_rank", "kv_lora_rank", latent),
        HfField("qk_nope_head_dim", "qk_nope_head_dim", plain),
        HfField("qk_rope_head_dim", "qk_rope_head_dim", rotary),
        HfField("attention_bias", "use_latent_bias", False),
    )


LATENT_ATTENTION = tuple(
    tensor
    for hf, name in {
        "q_proj": "q",
        "q_a_proj": "q_down",
        "q_b_proj": "q_up",
        "kv_a_proj_with_mqa": "kv_down",
        "kv_b_proj": "kv_up",
        "o_proj": "out",
    }.items()
    for tensor in linear_tensors(f"{LAYER}.self_attn.{hf}", f"{BLOCK}.attention.{name}")
) + tuple(
    HfTensor(f"{LAYER}.self_attn.{name}_a_layernorm.weight", (f"{BLOCK}.attention.{name}_norm.scale",))
    for name in ("q", "kv")
)


def latent_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Reads rotary positions and the scale of attention scores.

    Raises:
        ValueError: if heads share keys and values, or for unsupported rotary positions.
    """
    if hf.get("num_key_value_heads") not in (None, hf.get("num_attention_heads")):
        raise ValueError("num_key_value_heads is not supported where it differs from num_attention_heads")
    block = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    rope = rope_from_hf(hf)
    scale = block.get("mscale_all_dim") if isinstance(rope, YarnRope) else None
    return {"rope": rope, "mscale_all_dim": float(scale or 0.0)}


def latent_to_hf(config: LatentConfig) -> dict[str, Any]:
    """The inverse of `latent_from_hf`, with the fields that follow from other fields."""
    fields = rope_to_hf(config.rope)
    if config.mscale_all_dim:
        for key in ("rope_parameters", "rope_scaling"):
            fields[key] = {**fields[key], "mscale_all_dim": config.mscale_all_dim}
    return {"num_key_value_heads": config.num_heads, **fields}
