"""Granite 3 (Granite team 2024): Llama's parts, with constant multipliers of embeddings, attention scores, residual
terms and logits, which follow from the maximal update parametrisation (Yang et al. 2022).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from lm_trainer.models.hf_table import HfFamily, HfField
from lm_trainer.models.rope import rope_from_hf
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
from lm_trainer.nn.spec import BlockSpec, DecoderSpec, EmbeddingSpec

MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
"""Constant factors of the format."""


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope": rope_from_hf(hf), **heads_from_hf(hf, kv_heads=None)}


class GraniteConfig(RotaryConfig):
    """The Granite 3 family without experts; the defaults are Granite 3 2B."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="granite",
        reference="ibm-granite/granite-3.0-2b-base",
        architecture="GraniteForCausalLM",
        fields=(*hf_fields(), *(HfField(name, name, 1.0) for name in MULTIPLIERS)),
        tensors=(*EMBEDDING, HEAD, *PRE_NORMS, *ATTENTION, *MLP),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed={"attention_bias": False, "mlp_bias": False},
        inert={"attention_dropout": 0.0},
        computed_from_hf=_from_hf,
        computed_to_hf=common_fields_to_hf,
        tied=TIED,
    )

    type: Literal["granite"] = "granite"
    """Name of the model family."""
    seq_len: int = Field(default=4096, gt=0)
    """Maximum sequence length in tokens."""
    num_layers: int = Field(default=40, gt=0)
    """Number of blocks."""
    hidden_dim: int = Field(default=2048, gt=0)
    """Width of the residual stream."""
    intermediate_dim: int = Field(default=8192, gt=0)
    """Width of the MLP."""
    num_kv_heads: int = Field(default=8, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads."""
    tie_word_embeddings: bool = True
    """Ties the weights of the output layer to the token embedding."""
    embedding_multiplier: float = Field(default=12.0, gt=0)
    """Factor of the token embeddings."""
    attention_multiplier: float = Field(default=1 / 64, gt=0)
    """Factor of the attention scores, which replaces 1 / sqrt(head_dim)."""
    residual_multiplier: float = Field(default=0.22, gt=0)
    """Factor of the outputs of attention and MLP, before they are added to the residual stream."""
    logits_scaling: float = Field(default=8.0, gt=0)
    """Divides the logits."""

    def spec(self, vocab_size: int) -> DecoderSpec:
        block = BlockSpec(
            replace(self.attention_spec(), scores=self.score_spec(self.attention_multiplier)),
            self.mlp_spec(),
            pre_norm=self.norm_spec(),
            residual_scale=self.residual_multiplier,
        )
        return self.decoder_spec(
            vocab_size,
            (block,) * self.num_layers,
            embedding=EmbeddingSpec(scale=self.embedding_multiplier),
            logit_scale=1.0 / self.logits_scaling,
        )
