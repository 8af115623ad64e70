"""Settings, parts of the spec and tensors shared by families with rotary positions and gated MLPs.

The file of each family lists the parts that it uses. No code in this module depends on the family.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field, model_validator

from lm_trainer.models.base import ActivationName, DecoderConfig
from lm_trainer.models.hf_table import HfField, HfTensor, linear_tensors
from lm_trainer.models.rope import AnyRope, DefaultRope, rope_to_hf
from lm_trainer.nn.spec import AttentionSpec, BlockSpec, DecoderSpec, EmbeddingSpec, HeadSpec, MlpSpec, NormSpec

ACTIVATIONS: Mapping[str, str] = {"swish": "silu", "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}
"""Hugging Face's other names for activations."""


class RotaryConfig(DecoderConfig):
    """Settings of a decoder with rotary positions and a gated MLP."""

    seq_len: int = Field(default=2048, gt=0)
    """Maximum sequence length in tokens."""
    num_layers: int = Field(default=32, gt=0)
    """Number of blocks."""
    hidden_dim: int = Field(default=4096, gt=0)
    """Width of the residual stream."""
    intermediate_dim: int = Field(default=11008, gt=0)
    """Width of the MLP."""
    num_heads: int = Field(default=32, gt=0)
    """Number of query heads."""
    num_kv_heads: int = Field(default=32, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads. 1: multi-query attention."""
    head_dim: int | None = Field(default=None, gt=0, multiple_of=2)
    """Number of dimensions per head. Unset: hidden_dim / num_heads."""
    activation_function: ActivationName = "silu"
    """Activation of the MLP's gate: gelu (exact), gelu_new (its tanh approximation), quick_gelu, relu, relu2 (its
    square), silu or tanh."""
    initializer_range: float = Field(default=0.02, ge=0)
    """Standard deviation of the initial weights. Weights that write to the residual stream are initialised with this
    divided by sqrt(2 * num_layers)."""
    layer_norm_epsilon: float = Field(default=1e-5, gt=0)
    """Epsilon that is added to the mean square in the norms."""
    tie_word_embeddings: bool = False
    """Ties the weights of the output layer to the token embedding."""
    rope: AnyRope = DefaultRope()
    """Rotary position embedding (RoPE)."""

    @model_validator(mode="after")
    def _check_heads_fit(self) -> "RotaryConfig":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        # A rotation pairs the two halves of a head, so the size must be even.
        if self.head_dim is None and self.hidden_dim % (2 * self.num_heads):
            raise ValueError(
                f"hidden_dim={self.hidden_dim} is not a multiple of 2 * num_heads={2 * self.num_heads}; set head_dim"
            )
        return self

    @model_validator(mode="after")
    def _check_rope_fits(self) -> "RotaryConfig":
        self.rope.check_head_size(int(self.head_size * self.rotated_fraction))
        return self

    def describe_difference_from_hf(self) -> str | None:
        return self.rope.describe_difference_from_hf(self.seq_len)

    @property
    def rotated_fraction(self) -> float:
        """Fraction of each head's dimensions that is rotated."""
        return 1.0

    @property
    def head_size(self) -> int:
        """`head_dim` with its default resolved."""
        return self.hidden_dim // self.num_heads if self.head_dim is None else self.head_dim

    def norm_spec(self) -> NormSpec:
        """Spec of the norms of this model."""
        return NormSpec(kind="rms", eps=self.layer_norm_epsilon, bias=False)

    def attention_spec(self) -> AttentionSpec:
        """Spec of grouped-query attention with rotary positions and without biases."""
        return AttentionSpec(
            num_heads=self.num_heads,
            head_dim=self.head_size,
            num_kv_heads=self.num_kv_heads,
            bias=False,
            out_bias=False,
            positions=self.rope.spec(self.seq_len, self.rotated_fraction),
            scores=self.score_spec(),
        )

    def mlp_spec(self) -> MlpSpec:
        """Spec of the gated MLP, without biases."""
        return MlpSpec(self.intermediate_dim, self.activation_function, bias=False, gated=True)

    def decoder_spec(
        self,
        vocab_size: int,
        blocks: tuple[BlockSpec, ...],
        *,
        prefix: int = 0,
        embedding: EmbeddingSpec | None = None,
        softcap: float | None = None,
        logit_scale: float | None = None,
    ) -> DecoderSpec:
        """Builds the spec of the full model. `prefix` is as in `DecoderSpec`; `logit_scale` multiplies the logits."""
        return DecoderSpec(
            vocab_size=vocab_size,
            hidden_dim=self.hidden_dim,
            num_positions=self.seq_len,
            blocks=blocks,
            prefix=prefix,
            final_norm=replace(self.norm_spec(), factor=logit_scale),
            embedding=embedding or EmbeddingSpec(),
            head=HeadSpec(tied=self.tie_word_embeddings, softcap=softcap),
            init_std=self.initializer_range,
            scan=self.scan,
            remat=self.remat,
            remat_groups=self.remat_groups,
        )


def hf_fields(
    *,
    activation: str = "hidden_act",
    epsilon: str = "rms_norm_eps",
    read: Mapping[str, str] = ACTIVATIONS,
    **defaults: Any,
) -> tuple[HfField, ...]:
    """Returns the config.json fields that these families share.

    Args:
        activation: name of the activation's field.
        epsilon: name of the field with the epsilon of the norms.
        read: maps names of activations in the file to ours.
        defaults: the family's transformers defaults, where they differ.
    """
    fields = (
        HfField("max_position_embeddings", "seq_len", 2048),
        HfField("hidden_size", "hidden_dim", 4096),
        HfField("intermediate_size", "intermediate_dim", 11008),
        HfField("num_hidden_layers", "num_layers", 32),
        HfField("num_attention_heads", "num_heads", 32),
        # One function has two names. The files of these families use PyTorch's name.
        HfField(activation, "activation_function", "silu", read=read, write={"gelu_new": "gelu_pytorch_tanh"}),
        HfField("initializer_range", "initializer_range", 0.02),
        HfField(epsilon, "layer_norm_epsilon", 1e-6),
        HfField("tie_word_embeddings", "tie_word_embeddings", False),
    )
    assert defaults.keys() <= {entry.hf for entry in fields}
    return tuple(replace(entry, default=defaults.get(entry.hf, entry.default)) for entry in fields)


def hf_fields_of_one_activation(**defaults: Any) -> tuple[HfField, ...]:
    """Returns `hf_fields` for a family with a single activation, which is no setting."""
    return tuple(entry for entry in hf_fields(**defaults) if entry.setting != "activation_function")


def heads_from_hf(hf: Mapping[str, Any], *, kv_heads: int | None, head_dim: int | None = None) -> dict[str, Any]:
    """Reads the numbers and sizes of heads. `kv_heads` and `head_dim` are transformers' defaults for absent keys."""
    heads = hf.get("num_attention_heads") or 32
    key_value_heads, size = hf.get("num_key_value_heads", kv_heads), hf.get("head_dim", head_dim)
    # Unset if it follows from the other sizes, so that a configuration without it describes the same model.
    is_default = size is None or size * heads == hf.get("hidden_size")
    return {
        "num_kv_heads": heads if key_value_heads is None else key_value_heads,
        "head_dim": None if is_default else size,
    }


def common_fields_to_hf(config: RotaryConfig) -> dict[str, Any]:
    """Returns the fields of config.json that are not copies of one of our settings."""
    return {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_size, **rope_to_hf(config.rope)}


LAYER = "layers.{}"
BLOCK = "blocks.{}"

EMBEDDING = (HfTensor("embed_tokens.weight", ("embed.tokens",)), HfTensor("norm.weight", ("final_norm.scale",)))
HEAD = HfTensor("lm_head.weight", ("head",))
TIED: Mapping[str, str] = {"lm_head.weight": "embed_tokens.weight"}
# Lists biases for all families, because tensors without a parameter in the model are omitted from files.
ATTENTION = tuple(
    tensor
    for hf, name in {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out"}.items()
    for tensor in linear_tensors(f"{LAYER}.self_attn.{hf}", f"{BLOCK}.attention.{name}")
)
MLP = tuple(
    tensor
    for name in ("gate", "up", "down")
    for tensor in linear_tensors(f"{LAYER}.mlp.{name}_proj", f"{BLOCK}.mlp.{name}")
)
QK_NORM = tuple(
    HfTensor(f"{LAYER}.self_attn.{name}.weight", (f"{BLOCK}.attention.{name}.norm.scale",))
    for name in ("q_norm", "k_norm")
)


def layer_norm_tensors(**names: str) -> tuple[HfTensor, ...]:
    """Lists the tensors of a layer's norms. `names` maps our names to the names in the file."""
    return tuple(HfTensor(f"{LAYER}.{hf}.weight", (f"{BLOCK}.{name}.scale",)) for name, hf in names.items())


# `post_attention_layernorm` is the norm before the MLP, which comes after attention.
PRE_NORMS = layer_norm_tensors(attention_pre_norm="input_layernorm", mlp_pre_norm="post_attention_layernorm")


def layer_types(num_layers: int, pattern: int) -> list[str]:
    """Lists Hugging Face's name of each layer's kind. Every n-th layer has full attention; the others have a window."""
    return ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(num_layers)]


def pattern_from_hf(hf: Mapping[str, Any], default: int) -> int:
    """Finds the n such that every n-th layer has full attention and all others have a window.

    Raises:
        ValueError: if the layers in the file have another order.
    """
    # Depending on the version, files have one of these keys, or only `layer_types`.
    pattern = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or default
    kinds = hf.get("layer_types")
    if kinds is None:
        return pattern
    # Without a layer with full attention, the pattern is longer than the model.
    first = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    for candidate in (pattern, first):
        if kinds == layer_types(len(kinds), candidate):
            return candidate
    raise ValueError("layer_types is not supported, only one full_attention layer after every n sliding_attention are")


def check_layer_types(hf: Mapping[str, Any], is_windowed: Callable[[int], bool]) -> None:
    """Checks that `layer_types`, if the file has it, agrees with the windowed layers that its other fields imply.

    Raises:
        ValueError: if they differ.
    """
    kinds = hf.get("layer_types")
    if kinds is None or hf.get("sliding_window") is None:
        return
    if [kind == "sliding_attention" for kind in kinds] != [is_windowed(layer) for layer in range(len(kinds))]:
        raise ValueError("layer_types is not supported where it differs from max_window_layers")
