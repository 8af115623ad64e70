"""Seed-OSS (ByteDance Seed 2025): Llama's parts, with biases of queries, keys and values, and heads that do not divide
the hidden dimension.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from lm_trainer.models.hf_table import HfFamily, HfField
from lm_trainer.models.rope import AnyRope, DefaultRope, rope_from_hf
from lm_trainer.models.rotary import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    MLP,
    PRE_NORMS,
    TIED,
    RotaryConfig,
    common_fields_to_hf,
    heads_from_hf,
    hf_fields,
)
from lm_trainer.nn.spec import BlockSpec, DecoderSpec


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope": rope_from_hf(hf), **heads_from_hf(hf, kv_heads=8, head_dim=128)}


class SeedOssConfig(RotaryConfig):
    """The Seed-OSS family; the defaults are Seed-OSS 36B."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="seed_oss",
        reference="ByteDance-Seed/Seed-OSS-36B-Base",
        architecture="SeedOssForCausalLM",
        fields=(
            *hf_fields(
                intermediate_size=27648,
                num_hidden_layers=64,
                num_attention_heads=80,
                max_position_embeddings=524288,
            ),
            HfField("attention_bias", "use_qkv_bias", True),
            HfField("attention_out_bias", "use_out_bias", False),
            HfField("attention_dropout", "attn_pdrop", 0.1),
            HfField("residual_dropout", "resid_pdrop", 0.1),
        ),
        tensors=(*EMBEDDING, HEAD, *PRE_NORMS, *ATTENTION, *MLP),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed={"mlp_bias": False},
        inert={"pretraining_tp": 1},
        computed_from_hf=_from_hf,
        computed_to_hf=common_fields_to_hf,
        tied=TIED,
    )

    type: Literal["seed_oss"] = "seed_oss"
    """Name of the model family."""
    seq_len: int = Field(default=524288, gt=0)
    """Maximum sequence length in tokens."""
    num_layers: int = Field(default=64, gt=0)
    """Number of blocks."""
    hidden_dim: int = Field(default=5120, gt=0)
    """Width of the residual stream."""
    intermediate_dim: int = Field(default=27648, gt=0)
    """Width of the MLP."""
    num_heads: int = Field(default=80, gt=0)
    """Number of query heads."""
    num_kv_heads: int = Field(default=8, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads."""
    head_dim: int | None = Field(default=128, gt=0, multiple_of=2)
    """Number of dimensions per head. `null`: hidden_dim / num_heads."""
    layer_norm_epsilon: float = Field(default=1e-6, gt=0)
    """Epsilon that is added to the mean square in the norms."""
    rope: AnyRope = DefaultRope(theta=10_000_000.0)
    """Rotary position embedding (RoPE)."""
    use_qkv_bias: bool = True
    """Adds biases to queries, keys and values."""
    use_out_bias: bool = False
    """Adds a bias to the output projection of attention."""
    attn_pdrop: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the attention probabilities."""
    resid_pdrop: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the outputs of attention and MLP, before they are added to the residual stream."""

    def spec(self, vocab_size: int) -> DecoderSpec:
        attention = replace(
            self.attention_spec(),
            bias=self.use_qkv_bias,
            out_bias=self.use_out_bias,
            scores=self.score_spec(dropout=self.attn_pdrop),
        )
        block = BlockSpec(attention, self.mlp_spec(), pre_norm=self.norm_spec(), dropout=self.resid_pdrop)
        return self.decoder_spec(vocab_size, (block,) * self.num_layers)
