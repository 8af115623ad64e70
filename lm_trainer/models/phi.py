"""Phi-3 and Phi-4 (Abdin et al. 2024): a standard rotary decoder, whose files join matrices that have the same
input.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from lm_trainer.models.hf_table import HfFamily, HfField, linear_tensors
from lm_trainer.models.rope import ORIGINAL_LENGTH, LongRope, RopeConfig, fraction_from_hf, fraction_to_hf, rope_from_hf
from lm_trainer.models.rotary import (
    BLOCK,
    EMBEDDING,
    HEAD,
    LAYER,
    PRE_NORMS,
    TIED,
    RotaryConfig,
    common_fields_to_hf,
    heads_from_hf,
    hf_fields,
)
from lm_trainer.nn.spec import BlockSpec, DecoderSpec


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        # transformers uses 4096 if the length is not outside the block, even if the block contains it.
        "rope": rope_from_hf({**hf, ORIGINAL_LENGTH: hf.get(ORIGINAL_LENGTH) or 4096}),
        "partial_rotary_factor": fraction_from_hf(hf, 1.0),
        "sliding_window": hf.get("sliding_window"),
        **heads_from_hf(hf, kv_heads=None),
    }


def _to_hf(config: "Phi3Config") -> dict[str, Any]:
    if config.head_size * config.num_heads != config.hidden_dim:
        raise ValueError("its heads have the size hidden_dim / num_heads, but the model was made with another head_dim")
    shared = common_fields_to_hf(config)
    # The format has no such key; the check above ensures that none is needed.
    del shared["head_dim"]
    return {
        **fraction_to_hf(shared, config.partial_rotary_factor),
        "sliding_window": config.sliding_window,
        **_longrope_fields(config.rope, config.seq_len),
    }


def _longrope_fields(rope: RopeConfig, seq_len: int) -> dict[str, Any]:
    """Returns LongRoPE's fields outside its block, and the block with only those keys that transformers 4 accepts."""
    if not isinstance(rope, LongRope):
        return {}
    original = rope.original_max_position_embeddings
    fields: dict[str, Any] = {ORIGINAL_LENGTH: original}
    # A factor that the two lengths imply is left out of the block, so that both versions of transformers can read it.
    if rope.attention_factor is None and rope.factor == seq_len / original:
        block = {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
        fields["rope_scaling"] = {"type": "longrope", **block}
    return fields


_JOINED = (
    *linear_tensors(f"{LAYER}.self_attn.qkv_proj", *(f"{BLOCK}.attention.{name}" for name in "qkv")),
    *linear_tensors(f"{LAYER}.self_attn.o_proj", f"{BLOCK}.attention.out"),
    *linear_tensors(f"{LAYER}.mlp.gate_up_proj", f"{BLOCK}.mlp.gate", f"{BLOCK}.mlp.up"),
    *linear_tensors(f"{LAYER}.mlp.down_proj", f"{BLOCK}.mlp.down"),
)


class Phi3Config(RotaryConfig):
    """The Phi-3 family, which includes Phi-4 and Phi-4-mini. The defaults are Phi-3 mini."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        fields=(
            *hf_fields(hidden_size=3072, intermediate_size=8192, max_position_embeddings=4096, rms_norm_eps=1e-5),
            HfField("resid_pdrop", "resid_pdrop", 0.0),
        ),
        tensors=(*EMBEDDING, HEAD, *PRE_NORMS, *_JOINED),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed={},
        inert={"attention_dropout": 0.0, "embd_pdrop": 0.0},
        read_only=("original_max_position_embeddings", "interpolate_factor", "full_attn_mod"),
        computed_from_hf=_from_hf,
        computed_to_hf=_to_hf,
        tied=TIED,
    )

    type: Literal["phi3"] = "phi3"
    """Name of the model family."""
    seq_len: int = Field(default=4096, gt=0)
    """Maximum sequence length in tokens."""
    hidden_dim: int = Field(default=3072, gt=0)
    """Width of the residual stream."""
    intermediate_dim: int = Field(default=8192, gt=0)
    """Width of the MLP."""
    sliding_window: int | None = Field(default=None, gt=0)
    """Number of positions that attention can see, including the current one. Unset: all previous positions."""
    partial_rotary_factor: float = Field(default=1.0, gt=0, le=1)
    """Fraction of each head's dimensions that is rotated, counted from the first dimension."""
    resid_pdrop: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the outputs of attention and MLP, before they are added to the residual stream."""

    @property
    def rotated_fraction(self) -> float:
        return self.partial_rotary_factor

    def spec(self, vocab_size: int) -> DecoderSpec:
        block = BlockSpec(
            replace(self.attention_spec(), window=self.sliding_window),
            self.mlp_spec(),
            pre_norm=self.norm_spec(),
            dropout=self.resid_pdrop,
        )
        return self.decoder_spec(vocab_size, (block,) * self.num_layers)
