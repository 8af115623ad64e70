"""GPT-NeoX and Pythia (Black et al. 2022): attention and MLP in parallel, rotary positions on a part of each head."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lm_trainer.models.base import ActivationName
from lm_trainer.models.equal_heads import EqualHeadsConfig
from lm_trainer.models.hf_table import HfFamily, HfField, HfTensor, linear_tensors
from lm_trainer.models.rope import AnyRope, DefaultRope, fraction_from_hf, fraction_to_hf, rope_from_hf, rope_to_hf
from lm_trainer.models.rotary import ACTIVATIONS
from lm_trainer.nn.spec import AttentionSpec, BlockSpec, DecoderSpec, MlpSpec, NormSpec


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    # The family's own name for theta in earlier versions. If it is present, transformers ignores a top-level
    # `rope_theta`.
    theta = float(hf.get("rotary_emb_base") or 10_000.0)
    return {
        "rope": rope_from_hf({**hf, "rope_theta": None}, theta),
        "rotary_pct": fraction_from_hf(hf, 0.25, "rotary_pct"),
    }


def _to_hf(config: "GptNeoxConfig") -> dict[str, Any]:
    rope = fraction_to_hf(rope_to_hf(config.rope), config.rotary_pct, "rotary_pct")
    return {**rope, "rotary_emb_base": config.rope.theta}


_TENSORS = (
    HfTensor("embed_in.weight", ("embed.tokens",)),
    HfTensor("embed_out.weight", ("head",)),
    HfTensor("final_layer_norm.weight", ("final_norm.scale",)),
    HfTensor("final_layer_norm.bias", ("final_norm.bias",)),
    *(
        HfTensor(f"layers.{{}}.{hf_module}.{hf}", (f"blocks.{{}}.{module}.{name}",))
        for hf_module, module in {
            "input_layernorm": "attention_pre_norm",
            "post_attention_layernorm": "mlp_pre_norm",
        }.items()
        for hf, name in {"weight": "scale", "bias": "bias"}.items()
    ),
    # The file interleaves query, key and value head by head.
    *linear_tensors(
        "layers.{}.attention.query_key_value", *(f"blocks.{{}}.attention.{name}" for name in "qkv"), interleaved=True
    ),
    *linear_tensors("layers.{}.attention.dense", "blocks.{}.attention.out"),
    *linear_tensors("layers.{}.mlp.dense_h_to_4h", "blocks.{}.mlp.up"),
    *linear_tensors("layers.{}.mlp.dense_4h_to_h", "blocks.{}.mlp.down"),
)


class GptNeoxConfig(EqualHeadsConfig):
    """The GPT-NeoX family, which includes Pythia. The defaults are the sizes of GPT-NeoX 20B."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="gpt_neox",
        reference="EleutherAI/gpt-neox-20b",
        architecture="GPTNeoXForCausalLM",
        fields=(
            HfField("max_position_embeddings", "seq_len", 2048),
            HfField("hidden_size", "hidden_dim", 6144),
            HfField("intermediate_size", "intermediate_dim", 24576),
            HfField("num_hidden_layers", "num_layers", 44),
            HfField("num_attention_heads", "num_heads", 64),
            HfField("hidden_act", "activation_function", "gelu", read=ACTIVATIONS),
            HfField("initializer_range", "initializer_range", 0.02),
            HfField("layer_norm_eps", "layer_norm_epsilon", 1e-5),
            HfField("tie_word_embeddings", "tie_word_embeddings", False),
            HfField("use_parallel_residual", "use_parallel_residual", True),
            HfField("attention_bias", "use_bias", True),
            HfField("attention_dropout", "attn_pdrop", 0.0),
            HfField("hidden_dropout", "resid_pdrop", 0.0),
        ),
        tensors=_TENSORS,
        prefix="gpt_neox.",
        unprefixed=("embed_out.weight",),
        fixed={},
        read_only=("partial_rotary_factor",),
        computed_from_hf=_from_hf,
        computed_to_hf=_to_hf,
        ignored=r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
        tied={"embed_out.weight": "embed_in.weight"},
    )

    type: Literal["gpt_neox"] = "gpt_neox"
    """Name of the model family."""
    seq_len: int = Field(default=2048, gt=0)
    """Maximum sequence length in tokens."""
    num_layers: int = Field(default=44, gt=0)
    """Number of blocks."""
    hidden_dim: int = Field(default=6144, gt=0)
    """Width of the residual stream; must be a multiple of num_heads."""
    intermediate_dim: int = Field(default=24576, gt=0)
    """Width of the MLP."""
    num_heads: int = Field(default=64, gt=0)
    """Number of attention heads, each of size hidden_dim / num_heads."""
    activation_function: ActivationName = "gelu"
    """Activation of the MLP: gelu (exact), gelu_new (its tanh approximation), quick_gelu, relu, relu2 (its square),
    silu or tanh."""
    tie_word_embeddings: bool = False
    """Ties the weights of the output layer to the token embedding."""
    use_parallel_residual: bool = True
    """Gives attention and MLP the same input. Otherwise the MLP reads the residual stream after attention."""
    use_bias: bool = True
    """Adds biases to the linear layers of attention. The linear layers of the MLP and LayerNorm always have them."""
    rope: AnyRope = DefaultRope()
    """Rotary position embedding (RoPE)."""
    rotary_pct: float = Field(default=0.25, gt=0, le=1)
    """Fraction of each head's dimensions that is rotated, counted from the first dimension."""

    @model_validator(mode="after")
    def _check_rotary_pairs(self) -> "GptNeoxConfig":
        if (rotated := int(self.head_size * self.rotary_pct)) % 2 or not rotated:
            raise ValueError(f"rotary_pct={self.rotary_pct} rotates {rotated} dimensions of a head; make that even")
        self.rope.check_head_size(rotated)
        return self

    def spec(self, vocab_size: int) -> DecoderSpec:
        norm = NormSpec(eps=self.layer_norm_epsilon)
        attention = AttentionSpec(
            self.num_heads,
            self.head_size,
            bias=self.use_bias,
            out_bias=self.use_bias,
            positions=self.rope.spec(self.seq_len, self.rotary_pct),
            scores=self.score_spec(dropout=self.attn_pdrop),
        )
        mlp = MlpSpec(self.intermediate_dim, self.activation_function)
        block = BlockSpec(attention, mlp, norm, dropout=self.resid_pdrop, parallel=self.use_parallel_residual)
        return self.decoder_spec(vocab_size, block, norm, tied=self.tie_word_embeddings)
