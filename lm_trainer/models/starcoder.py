"""StarCoder2 (Lozhkov et al. 2024): rotary positions, LayerNorm, grouped heads, sliding windows, and a plain MLP. All
linear layers have biases.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from lm_trainer.models.base import ActivationName
from lm_trainer.models.hf_table import HfFamily, HfField, HfTensor, linear_tensors
from lm_trainer.models.rope import AnyRope, DefaultRope, rope_from_hf
from lm_trainer.models.rotary import (
    ATTENTION,
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
from lm_trainer.nn.spec import BlockSpec, DecoderSpec, EmbeddingSpec, MlpSpec, NormSpec

_NORM_BIASES = (
    HfTensor("norm.bias", ("final_norm.bias",)),
    HfTensor(f"{LAYER}.input_layernorm.bias", (f"{BLOCK}.attention_pre_norm.bias",)),
    HfTensor(f"{LAYER}.post_attention_layernorm.bias", (f"{BLOCK}.mlp_pre_norm.bias",)),
)
_MLP = (
    *linear_tensors(f"{LAYER}.mlp.c_fc", f"{BLOCK}.mlp.up"),
    *linear_tensors(f"{LAYER}.mlp.c_proj", f"{BLOCK}.mlp.down"),
)


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "sliding_window": hf.get("sliding_window"),
        "rope": rope_from_hf(hf),
        **heads_from_hf(hf, kv_heads=2),
    }


def _to_hf(config: "StarCoder2Config") -> dict[str, Any]:
    return {"sliding_window": config.sliding_window, **common_fields_to_hf(config)}


class StarCoder2Config(RotaryConfig):
    """The StarCoder2 family; the defaults are StarCoder2 3B."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="starcoder2",
        reference="bigcode/starcoder2-3b",
        architecture="Starcoder2ForCausalLM",
        fields=(
            *hf_fields(
                epsilon="norm_epsilon",
                hidden_size=3072,
                intermediate_size=12288,
                num_hidden_layers=30,
                num_attention_heads=24,
                hidden_act="gelu_new",
                max_position_embeddings=4096,
                initializer_range=0.018042,
                norm_epsilon=1e-5,
                tie_word_embeddings=True,
            ),
            HfField("use_bias", "use_bias", True),
            HfField("attention_dropout", "attn_pdrop", 0.0),
            HfField("residual_dropout", "resid_pdrop", 0.0),
            HfField("embedding_dropout", "embed_pdrop", 0.0),
        ),
        tensors=(*EMBEDDING, HEAD, *PRE_NORMS, *_NORM_BIASES, *ATTENTION, *_MLP),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed={},
        read_only=(
            *("activation_function", "attention_softmax_in_fp32", "layer_norm_epsilon", "mlp_type"),
            *("norm_type", "scale_attention_softmax_in_fp32"),
        ),
        computed_from_hf=_from_hf,
        computed_to_hf=_to_hf,
        tied=TIED,
    )

    type: Literal["starcoder2"] = "starcoder2"
    """Name of the model family."""
    seq_len: int = Field(default=16384, gt=0)
    """Maximum sequence length in tokens."""
    num_layers: int = Field(default=30, gt=0)
    """Number of blocks."""
    hidden_dim: int = Field(default=3072, gt=0)
    """Width of the residual stream."""
    intermediate_dim: int = Field(default=12288, gt=0)
    """Width of the MLP."""
    num_heads: int = Field(default=24, gt=0)
    """Number of query heads."""
    num_kv_heads: int = Field(default=2, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads."""
    activation_function: ActivationName = "gelu_new"
    """Activation of the MLP: gelu (exact), gelu_new (its tanh approximation), quick_gelu, relu, relu2 (its square),
    silu or tanh."""
    initializer_range: float = Field(default=0.018042, ge=0)
    """Standard deviation of the initial weights. Weights that write to the residual stream are initialised with this
    divided by sqrt(2 * num_layers)."""
    layer_norm_epsilon: float = Field(default=1e-5, gt=0)
    """Epsilon that is added to the variance in the norms."""
    tie_word_embeddings: bool = True
    """Ties the weights of the output layer to the token embedding."""
    rope: AnyRope = DefaultRope(theta=999_999.4420358813)
    """Rotary position embedding (RoPE)."""
    sliding_window: int | None = Field(default=4096, gt=0)
    """Number of positions that attention can see, including the current one; `null`: all previous positions."""
    use_bias: bool = True
    """Adds biases to the linear layers of attention and MLP. LayerNorm always has them."""
    embed_pdrop: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate after the embeddings."""
    attn_pdrop: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the attention probabilities."""
    resid_pdrop: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the outputs of attention and MLP, before they are added to the residual stream."""

    def norm_spec(self) -> NormSpec:
        return NormSpec(eps=self.layer_norm_epsilon)

    def mlp_spec(self) -> MlpSpec:
        return MlpSpec(self.intermediate_dim, self.activation_function, bias=self.use_bias)

    def spec(self, vocab_size: int) -> DecoderSpec:
        attention = replace(
            self.attention_spec(),
            bias=self.use_bias,
            out_bias=self.use_bias,
            window=self.sliding_window,
            scores=self.score_spec(dropout=self.attn_pdrop),
        )
        block = BlockSpec(attention, self.mlp_spec(), pre_norm=self.norm_spec(), dropout=self.resid_pdrop)
        embedding = EmbeddingSpec(dropout=self.embed_pdrop)
        return self.decoder_spec(vocab_size, (block,) * self.num_layers, embedding=embedding)
