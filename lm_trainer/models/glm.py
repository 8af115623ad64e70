"""GLM-4 of April 2025 (GLM team 2024): norms before and after each sublayer, and rotary positions that pair adjacent
dimensions in the first half of each head. The files join the matrices of gate and up.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from lm_trainer.models.hf_table import HfFamily, HfField, linear_tensors
from lm_trainer.models.rope import fraction_from_hf, fraction_to_hf, rope_from_hf
from lm_trainer.models.rotary import (
    ATTENTION,
    BLOCK,
    EMBEDDING,
    HEAD,
    LAYER,
    TIED,
    RotaryConfig,
    common_fields_to_hf,
    heads_from_hf,
    hf_fields,
    layer_norm_tensors,
)
from lm_trainer.nn.spec import BlockSpec, DecoderSpec

_NORMS = layer_norm_tensors(
    attention_pre_norm="input_layernorm",
    attention_post_norm="post_self_attn_layernorm",
    # The norm before the MLP, which comes after attention.
    mlp_pre_norm="post_attention_layernorm",
    mlp_post_norm="post_mlp_layernorm",
)
_MLP = (
    *linear_tensors(f"{LAYER}.mlp.gate_up_proj", f"{BLOCK}.mlp.gate", f"{BLOCK}.mlp.up"),
    *linear_tensors(f"{LAYER}.mlp.down_proj", f"{BLOCK}.mlp.down"),
)
_FRACTION, _EPSILON = 0.5, 1.5625e-7


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rope": rope_from_hf(hf),
        "partial_rotary_factor": fraction_from_hf(hf, _FRACTION),
        **heads_from_hf(hf, kv_heads=2, head_dim=128),
    }


def _to_hf(config: "Glm4Config") -> dict[str, Any]:
    return fraction_to_hf(common_fields_to_hf(config), config.partial_rotary_factor)


class Glm4Config(RotaryConfig):
    """The GLM-4 family of April 2025 without experts; the defaults are GLM-4 9B."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="glm4",
        reference="zai-org/GLM-4-9B-0414",
        architecture="Glm4ForCausalLM",
        fields=(
            *hf_fields(
                intermediate_size=13696,
                num_hidden_layers=40,
                max_position_embeddings=131072,
                rms_norm_eps=_EPSILON,
            ),
            HfField("attention_bias", "use_bias", True),
        ),
        tensors=(*EMBEDDING, HEAD, *_NORMS, *ATTENTION, *_MLP),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed={},
        inert={"attention_dropout": 0.0},
        computed_from_hf=_from_hf,
        computed_to_hf=_to_hf,
        tied=TIED,
    )

    type: Literal["glm4"] = "glm4"
    """Name of the model family."""
    seq_len: int = Field(default=32768, gt=0)
    """Maximum sequence length in tokens."""
    num_layers: int = Field(default=40, gt=0)
    """Number of blocks."""
    intermediate_dim: int = Field(default=13696, gt=0)
    """Width of the MLP."""
    num_kv_heads: int = Field(default=2, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads."""
    layer_norm_epsilon: float = Field(default=1e-5, gt=0)
    """Epsilon that is added to the mean square in the norms."""
    use_bias: bool = True
    """Adds biases to queries, keys and values."""
    partial_rotary_factor: float = Field(default=_FRACTION, gt=0, le=1)
    """Fraction of each head's dimensions that is rotated, counted from the first dimension."""

    @property
    def rotated_fraction(self) -> float:
        return self.partial_rotary_factor

    def spec(self, vocab_size: int) -> DecoderSpec:
        rope = replace(self.rope.spec(self.seq_len, self.rotated_fraction), interleaved=True)
        attention = replace(self.attention_spec(), bias=self.use_bias, positions=rope)
        norm = self.norm_spec()
        block = BlockSpec(attention, self.mlp_spec(), pre_norm=norm, post_norm=norm)
        return self.decoder_spec(vocab_size, (block,) * self.num_layers)
