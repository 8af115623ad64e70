"""Mistral (Jiang et al. 2023): rotary positions, RMSNorm before each sublayer, gated MLP, sliding windows."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from lm_trainer.models.hf_table import HfFamily
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
from lm_trainer.nn.spec import BlockSpec, DecoderSpec


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    # An absent key means the default of transformers, and null means no window.
    window = hf.get("sliding_window", 4096)
    return {"sliding_window": window, "rope": rope_from_hf(hf), **heads_from_hf(hf, kv_heads=8)}


def _to_hf(config: "MistralConfig") -> dict[str, Any]:
    return {"sliding_window": config.sliding_window, **common_fields_to_hf(config)}


_HF = HfFamily(
    model_type="mistral",
    reference="mistralai/Mistral-7B-v0.1",
    architecture="MistralForCausalLM",
    fields=hf_fields(intermediate_size=14336, max_position_embeddings=131072),
    tensors=(*EMBEDDING, HEAD, *PRE_NORMS, *ATTENTION, *MLP),
    prefix="model.",
    unprefixed=(HEAD.hf,),
    fixed={},
    inert={"attention_dropout": 0.0},
    computed_from_hf=_from_hf,
    computed_to_hf=_to_hf,
    ignored=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    tied=TIED,
)


class MistralConfig(RotaryConfig):
    """The Mistral family; the defaults are Mistral 7B."""

    hf: ClassVar[HfFamily] = _HF

    type: Literal["mistral"] = "mistral"
    """Name of the model family."""
    seq_len: int = Field(default=8192, gt=0)
    """Maximum sequence length in tokens."""
    intermediate_dim: int = Field(default=14336, gt=0)
    """Width of the MLP."""
    num_kv_heads: int = Field(default=8, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads."""
    sliding_window: int | None = Field(default=4096, gt=0)
    """Number of positions that attention can see, including the current one; `null`: all previous positions."""

    def spec(self, vocab_size: int) -> DecoderSpec:
        attention = replace(self.attention_spec(), window=self.sliding_window)
        block = BlockSpec(attention, self.mlp_spec(), pre_norm=self.norm_spec())
        return self.decoder_spec(vocab_size, (block,) * self.num_layers)
