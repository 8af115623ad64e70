"""MiniCPM3 (Hu et al. 2024, arXiv 2404.06395): multi-head latent attention and a plain gated MLP, with constant
multipliers of embeddings, residual terms and logits.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from lm_trainer.models.hf_table import HfFamily, HfField
from lm_trainer.models.latent import LATENT_ATTENTION, LatentConfig, latent_fields, latent_from_hf, latent_to_hf
from lm_trainer.models.rotary import EMBEDDING, HEAD, MLP, PRE_NORMS, TIED, hf_fields
from lm_trainer.nn.spec import BlockSpec, DecoderSpec, EmbeddingSpec


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = hf.get("hidden_size") or 2560, hf.get("num_attention_heads") or 40
    # An absent key means the default of transformers, and null means no scaling.
    depth, base = hf.get("scale_depth", 1.4), hf.get("dim_model_base", 256)
    rank = hf.get("q_lora_rank", 768)
    return {
        "q_lora_rank": rank,
        "v_head_dim": hf.get("v_head_dim") or hidden // heads,
        "scale_depth": math.sqrt(hf.get("num_hidden_layers") or 62) if depth is None else depth,
        "dim_model_base": hidden if base is None else base,
        **latent_from_hf(hf),
    }


def _to_hf(config: "MiniCpm3Config") -> dict[str, Any]:
    names = ("q_lora_rank", "v_head_dim", "scale_depth", "dim_model_base")
    return {**{name: getattr(config, name) for name in names}, **latent_to_hf(config)}


class MiniCpm3Config(LatentConfig):
    """The MiniCPM3 family; the defaults are MiniCPM3 4B, without its scaled rotary positions."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="minicpm3",
        reference="openbmb/MiniCPM3-4B",
        architecture="MiniCPM3ForCausalLM",
        fields=(
            *hf_fields(
                hidden_size=2560,
                intermediate_size=6400,
                num_hidden_layers=62,
                num_attention_heads=40,
                max_position_embeddings=32768,
                initializer_range=0.1,
                rms_norm_eps=1e-5,
                tie_word_embeddings=True,
            ),
            *latent_fields(latent=256, plain=64, rotary=32),
            HfField("scale_emb", "scale_emb", 12.0),
        ),
        tensors=(*EMBEDDING, HEAD, *PRE_NORMS, *LATENT_ATTENTION, *MLP),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed={"mlp_bias": False},
        inert={"attention_dropout": 0.0, "pretraining_tp": 1},
        read_only=("head_dim", "qk_head_dim"),
        computed_from_hf=_from_hf,
        computed_to_hf=_to_hf,
        tied=TIED,
    )

    type: Literal["minicpm3"] = "minicpm3"
    """Name of the model family."""
    seq_len: int = Field(default=32768, gt=0)
    """Maximum sequence length in tokens."""
    num_layers: int = Field(default=62, gt=0)
    """Number of blocks."""
    hidden_dim: int = Field(default=2560, gt=0)
    """Width of the residual stream."""
    intermediate_dim: int = Field(default=6400, gt=0)
    """Width of the MLP."""
    num_heads: int = Field(default=40, gt=0)
    """Number of heads."""
    tie_word_embeddings: bool = True
    """Ties the weights of the output layer to the token embedding."""
    kv_lora_rank: int = Field(default=256, gt=0)
    """Size of the latent from which keys and values are computed, and which a cache stores."""
    q_lora_rank: int | None = Field(default=768, gt=0)
    """Size of the latent from which queries are computed. `null`: queries are computed from the input."""
    qk_nope_head_dim: int = Field(default=64, gt=0)
    """Number of dimensions of a query and key without positions."""
    qk_rope_head_dim: int = Field(default=32, gt=0, multiple_of=2)
    """Number of dimensions of a query and key that are rotated. All heads share this part of the key."""
    v_head_dim: int = Field(default=64, gt=0)
    """Size of the value vectors of a head."""
    scale_emb: float = Field(default=12.0, gt=0)
    """Factor of the token embeddings."""
    scale_depth: float = Field(default=1.4, gt=0)
    """Factor of the outputs of attention and MLP, before they are divided by sqrt(num_layers) and added to the residual
    stream."""
    dim_model_base: int = Field(default=256, gt=0)
    """Factor of the logits, which are divided by hidden_dim."""

    def spec(self, vocab_size: int) -> DecoderSpec:
        block = BlockSpec(
            self.latent_spec(),
            self.mlp_spec(),
            pre_norm=self.norm_spec(),
            residual_scale=self.scale_depth / math.sqrt(self.num_layers),
        )
        return self.decoder_spec(
            vocab_size,
            (block,) * self.num_layers,
            embedding=EmbeddingSpec(scale=self.scale_emb),
            logit_scale=self.dim_model_base / self.hidden_dim,
        )
