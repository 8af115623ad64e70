"""MPT (MosaicML 2023): attention with linear biases (ALiBi) instead of position embeddings, and no other biases."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from lm_trainer.models.equal_heads import EqualHeadsConfig
from lm_trainer.models.hf_table import HfFamily, HfField, HfTensor, linear_tensors
from lm_trainer.nn.spec import AlibiSpec, AttentionSpec, BlockSpec, DecoderSpec, EmbeddingSpec, MlpSpec, NormSpec

MLP_RATIO = 4
"""Ratio of MLP width to model width. transformers always uses this ratio, and ignores `expansion_ratio`."""

_ATTENTION_ONLY = {
    "attn_type": "multihead_attention",
    "prefix_lm": False,
    "qk_ln": False,
    "alibi": True,
    "alibi_bias_max": 8,
}


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    attention = hf.get("attn_config") or {}
    unsupported = [
        f"attn_config.{key}={attention[key]!r}"
        for key, value in _ATTENTION_ONLY.items()
        if attention.get(key, value) != value
    ]
    if unsupported:
        raise ValueError(f"{', '.join(unsupported)} is not supported")
    return {
        "attn_pdrop": attention.get("attn_pdrop", 0.0),
        "clip_qkv": attention.get("clip_qkv"),
        "softmax_scale": attention.get("softmax_scale"),
    }


def _to_hf(config: "MptConfig") -> dict[str, Any]:
    return {
        "expansion_ratio": MLP_RATIO,
        "attn_config": {
            **_ATTENTION_ONLY,
            "model_type": "",
            "attn_impl": "torch",
            # transformers writes the integer 0 for no dropout.
            "attn_pdrop": config.attn_pdrop or 0,
            "clip_qkv": config.clip_qkv,
            "softmax_scale": config.softmax_scale,
        },
    }


class MptConfig(EqualHeadsConfig):
    """The MPT family; the defaults are the defaults of transformers."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="mpt",
        architecture="MptForCausalLM",
        fields=(
            HfField("max_seq_len", "seq_len", 2048),
            HfField("d_model", "hidden_dim", 2048),
            HfField("n_layers", "num_layers", 24),
            HfField("n_heads", "num_heads", 16),
            HfField("initializer_range", "initializer_range", 0.02),
            HfField("layer_norm_epsilon", "layer_norm_epsilon", 1e-5),
            HfField("resid_pdrop", "resid_pdrop", 0.0),
            HfField("emb_pdrop", "embed_pdrop", 0.0),
        ),
        tensors=(
            HfTensor("wte.weight", ("embed.tokens",)),
            HfTensor("norm_f.weight", ("final_norm.scale",)),
            HfTensor("blocks.{}.norm_1.weight", ("blocks.{}.attention_pre_norm.scale",)),
            HfTensor("blocks.{}.norm_2.weight", ("blocks.{}.mlp_pre_norm.scale",)),
            *linear_tensors("blocks.{}.attn.Wqkv", *(f"blocks.{{}}.attention.{name}" for name in "qkv")),
            *linear_tensors("blocks.{}.attn.out_proj", "blocks.{}.attention.out"),
            *linear_tensors("blocks.{}.ffn.up_proj", "blocks.{}.mlp.up"),
            *linear_tensors("blocks.{}.ffn.down_proj", "blocks.{}.mlp.down"),
        ),
        prefix="transformer.",
        fixed={"learned_pos_emb": True, "no_bias": True, "logit_scale": None, "tie_word_embeddings": True},
        read_only=("embedding_fraction", "norm_type", "init_config", "tokenizer_name"),
        computed_from_hf=_from_hf,
        computed_to_hf=_to_hf,
        tied={"lm_head.weight": "wte.weight"},
    )

    type: Literal["mpt"] = "mpt"
    """Name of the model family."""
    seq_len: int = Field(default=2048, gt=0)
    """Maximum sequence length in tokens."""
    num_layers: int = Field(default=24, gt=0)
    """Number of blocks."""
    hidden_dim: int = Field(default=2048, gt=0)
    """Width of the residual stream; must be a multiple of num_heads."""
    num_heads: int = Field(default=16, gt=0)
    """Number of attention heads, each of size hidden_dim / num_heads."""
    clip_qkv: float | None = Field(default=None, gt=0)
    """Maximum absolute value of the elements of queries, keys and values; unset: no bound."""
    softmax_scale: float | None = Field(default=None, gt=0)
    """Factor that multiplies the attention scores; unset: 1 / sqrt(head size)."""
    embed_pdrop: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate after the embeddings."""

    def spec(self, vocab_size: int) -> DecoderSpec:
        # transformers drops the biases of LayerNorm, since the published files have none.
        norm = NormSpec(eps=self.layer_norm_epsilon, bias=False)
        attention = AttentionSpec(
            self.num_heads,
            self.head_size,
            bias=False,
            out_bias=False,
            positions=AlibiSpec(),
            clip=self.clip_qkv,
            scores=self.score_spec(self.softmax_scale, dropout=self.attn_pdrop),
        )
        # transformers uses the exact GELU for every MPT.
        mlp = MlpSpec(self.hidden_dim * MLP_RATIO, "gelu", bias=False)
        block = BlockSpec(attention, mlp, pre_norm=norm, dropout=self.resid_pdrop)
        return self.decoder_spec(vocab_size, block, norm, embedding=EmbeddingSpec(dropout=self.embed_pdrop))
