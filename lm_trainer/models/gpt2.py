"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm before each part, tied head."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lm_trainer.models.base import DecoderConfig
from lm_trainer.models.hf_table import HfFamily, HfField, HfTensor
from lm_trainer.nn.spec import Activation, AttentionSpec, BlockSpec, DecoderSpec, EmbeddingSpec, MlpSpec, NormSpec

FLASH_BLOCK = 1024


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    inner, width = hf.get("n_inner"), hf.get("n_embd", 768)
    if inner is not None and inner % width:
        raise ValueError(f"n_inner={inner} is not supported, only multiples of n_embd={width} are")
    return {"mlp_scale": 4 if inner is None else inner // width}


def _to_hf(config: "Gpt2Config") -> dict[str, Any]:
    if not config.use_bias:
        raise ValueError("its linear layers and LayerNorm have biases, but the model was made with use_bias: false")
    return {"n_inner": None if config.mlp_scale == 4 else config.mlp_scale * config.hidden_dim}


_HF = HfFamily(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    fields=(
        HfField("n_positions", "seq_len", 1024, older=("n_ctx",)),
        HfField("n_embd", "hidden_dim", 768),
        HfField("n_layer", "num_layers", 12),
        HfField("n_head", "num_heads", 12),
        HfField("initializer_range", "initializer_range", 0.02),
        HfField("embd_pdrop", "embed_pdrop", 0.1),
        HfField("resid_pdrop", "resid_pdrop", 0.1),
        HfField("attn_pdrop", "attn_pdrop", 0.1),
        HfField("layer_norm_epsilon", "layer_norm_epsilon", 1e-5),
        HfField(
            "activation_function",
            "activation_function",
            "gelu_new",
            read={"swish": "silu", "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"},
        ),
        HfField("scale_attn_by_inverse_layer_idx", "scale_attn_by_inverse_layer_idx", False),
        HfField("reorder_and_upcast_attn", "upcast_attn", False),
    ),
    tensors=(
        HfTensor("wte.weight", ("embed.tokens",)),
        HfTensor("wpe.weight", ("embed.positions",)),
        HfTensor("ln_f.weight", ("final_norm.scale",)),
        HfTensor("ln_f.bias", ("final_norm.bias",)),
        HfTensor("h.{}.ln_1.weight", ("blocks.{}.attention_pre_norm.scale",)),
        HfTensor("h.{}.ln_1.bias", ("blocks.{}.attention_pre_norm.bias",)),
        HfTensor("h.{}.ln_2.weight", ("blocks.{}.mlp_pre_norm.scale",)),
        HfTensor("h.{}.ln_2.bias", ("blocks.{}.mlp_pre_norm.bias",)),
        *(
            HfTensor(f"h.{{}}.{theirs}.{kind}", tuple(f"blocks.{{}}.{name}.{kind}" for name in ours))
            for theirs, ours in {
                "attn.c_attn": ("attention.q", "attention.k", "attention.v"),
                "attn.c_proj": ("attention.out",),
                "mlp.c_fc": ("mlp.up",),
                "mlp.c_proj": ("mlp.down",),
            }.items()
            for kind in ("weight", "bias")
        ),
    ),
    prefix="transformer.",
    fixed={"scale_attn_weights": True, "add_cross_attention": False, "tie_word_embeddings": True},
    computed_from_hf=_from_hf,
    computed_to_hf=_to_hf,
    buffers=r"h\.\d+\.attn\.(bias|masked_bias)",
    tied={"lm_head.weight": "wte.weight"},
)


class Gpt2Config(DecoderConfig):
    """The GPT-2 family; the defaults are GPT-2 small (124M parameters)."""

    hf: ClassVar[HfFamily] = _HF

    type: Literal["gpt2"] = "gpt2"
    """The family."""
    hidden_dim: int = Field(default=768, gt=0)
    """Width of the residual stream; a multiple of num_heads."""
    num_heads: int = Field(default=12, gt=0)
    """Attention heads, each of size hidden_dim / num_heads."""
    mlp_scale: int = Field(default=4, gt=0)
    """Width of the MLP, in multiples of hidden_dim."""
    initializer_range: float = Field(default=0.02, ge=0)
    """Standard deviation of the initial weights. Those that write to the residual stream get it divided by
    sqrt(2 * num_layers)."""
    embed_pdrop: float = Field(default=0.0, ge=0, lt=1)
    """Dropout after the embeddings."""
    resid_pdrop: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of what attention and MLP add to the residual stream."""
    attn_pdrop: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the attention probabilities."""
    layer_norm_epsilon: float = Field(default=1e-5, gt=0)
    """Added to the variance in LayerNorm."""
    activation_function: Activation = "gelu_new"
    """Of the MLP: gelu (exact), gelu_new (its tanh approximation), relu or silu."""
    scale_attn_by_inverse_layer_idx: bool = False
    """Divides the attention scores of layer i (from 0) by i + 1."""
    use_bias: bool = True
    """Whether linear layers and LayerNorm have biases. Without them the model cannot be exported to Hugging Face."""

    use_flash_attention: bool | None = None
    """Whether attention keeps no sequence x sequence scores. `true` is short for `flash_attention_block_size: 1024`
    where that is not set; with `false` it may not be set. Unset: as `flash_attention_block_size` says."""

    @model_validator(mode="after")
    def _flash_agrees(self) -> "Gpt2Config":
        if self.use_flash_attention is False and self.flash_attention_block_size is not None:
            raise ValueError(
                f"use_flash_attention: false contradicts flash_attention_block_size: "
                f"{self.flash_attention_block_size}; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> "Gpt2Config":
        if self.hidden_dim % self.num_heads:
            raise ValueError(f"hidden_dim={self.hidden_dim} is not a multiple of num_heads={self.num_heads}")
        return self

    def spec(self, vocab_size: int) -> DecoderSpec:
        norm = NormSpec(eps=self.layer_norm_epsilon, bias=self.use_bias)
        block = BlockSpec(
            attention=AttentionSpec(
                num_heads=self.num_heads,
                head_dim=self.hidden_dim // self.num_heads,
                bias=self.use_bias,
                out_bias=self.use_bias,
                scores=replace(
                    self.scores(dropout=self.attn_pdrop),
                    inverse_layer=self.scale_attn_by_inverse_layer_idx,
                    block_size=self.flash_attention_block_size or (FLASH_BLOCK if self.use_flash_attention else None),
                ),
            ),
            mlp=MlpSpec(
                hidden_dim=self.hidden_dim * self.mlp_scale,
                activation=self.activation_function,
                bias=self.use_bias,
            ),
            pre_norm=norm,
            dropout=self.resid_pdrop,
        )
        return DecoderSpec(
            vocab_size=vocab_size,
            hidden_dim=self.hidden_dim,
            num_positions=self.seq_len,
            blocks=(block,) * self.num_layers,
            final_norm=norm,
            embedding=EmbeddingSpec(learned_positions=True, dropout=self.embed_pdrop),
            init_std=self.initializer_range,
            scan=self.scan,
            remat=self.remat,
        )
