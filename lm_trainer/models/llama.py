"""Llama 1, 2 and 3 (Touvron et al. 2023, Grattafiori et al. 2024): rotary positions, RMSNorm before each sublayer,
gated MLP, grouped-query attention.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

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
from lm_trainer.nn.spec import BlockSpec, DecoderSpec, EmbeddingSpec, NormSpec, QkNormSpec


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    bias = hf.get("attention_bias", False), hf.get("mlp_bias", False)
    # `use_bias` sets the biases of both.
    if bias[0] != bias[1]:
        raise ValueError(f"attention_bias={bias[0]} with mlp_bias={bias[1]} is not supported, only both alike are")
    return {"use_bias": bias[0], "rope": rope_from_hf(hf), **heads_from_hf(hf, kv_heads=None)}


def _to_hf(config: "LlamaConfig") -> dict[str, Any]:
    unsupported = {
        "hybrid_norm: true": config.hybrid_norm,
        "use_qk_norm: true": config.use_qk_norm,
        "input_embedding_norm: true": config.input_embedding_norm,
        "use_layer_norm_weight: false": not config.use_layer_norm_weight,
    }
    if names := [name for name, used in unsupported.items() if used]:
        raise ValueError(f"the format has no place for {', '.join(names)}")
    return {"attention_bias": config.use_bias, "mlp_bias": config.use_bias, **common_fields_to_hf(config)}


_HF = HfFamily(
    model_type="llama",
    reference="NousResearch/Llama-2-7b-hf",
    architecture="LlamaForCausalLM",
    fields=hf_fields(),
    tensors=(*EMBEDDING, HEAD, *PRE_NORMS, *ATTENTION, *MLP),
    prefix="model.",
    unprefixed=(HEAD.hf,),
    fixed={},
    # `pretraining_tp` only splits matrix products into slices whose results are added.
    inert={"attention_dropout": 0.0, "pretraining_tp": 1},
    computed_from_hf=_from_hf,
    computed_to_hf=_to_hf,
    # Rotary frequencies, which earlier versions of transformers saved with the weights. They follow from theta.
    ignored=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    tied=TIED,
)


class LlamaConfig(RotaryConfig):
    """The Llama family; the defaults are Llama 2 7B."""

    hf: ClassVar[HfFamily] = _HF
    refused_keys: ClassVar[Mapping[str, str]] = {
        **RotaryConfig.refused_keys,
        "tokenizer": "the tokenizer belongs to the data; use `data.tokenizer`",
    }

    type: Literal["llama"] = "llama"
    """Name of the model family."""
    hybrid_norm: bool = False
    """Adds a norm after attention and one after the MLP. Such a model cannot be exported to Hugging Face."""
    use_qk_norm: bool = False
    """Normalizes each head's queries and keys. Such a model cannot be exported to Hugging Face."""
    input_embedding_norm: bool = False
    """Normalizes the token embeddings. Such a model cannot be exported to Hugging Face."""
    use_bias: bool = False
    """Adds biases to the linear layers of attention and MLP."""
    use_layer_norm_weight: bool = True
    """Gives the norms learned gains. A model without them cannot be exported to Hugging Face."""

    def norm_spec(self) -> NormSpec:
        return replace(super().norm_spec(), scale=self.use_layer_norm_weight)

    def spec(self, vocab_size: int) -> DecoderSpec:
        norm = self.norm_spec()
        block = BlockSpec(
            mixer=replace(
                self.attention_spec(),
                bias=self.use_bias,
                out_bias=self.use_bias,
                qk_norm=QkNormSpec(norm) if self.use_qk_norm else None,
            ),
            mlp=replace(self.mlp_spec(), bias=self.use_bias),
            pre_norm=norm,
            post_norm=norm if self.hybrid_norm else None,
        )
        embedding = EmbeddingSpec(norm=norm if self.input_embedding_norm else None)
        return self.decoder_spec(vocab_size, (block,) * self.num_layers, embedding=embedding)
