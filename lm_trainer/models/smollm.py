"""SmolLM3 (Bakouch et al. 2025): Llama's parts, but every fourth layer has no positions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from lm_trainer.models.hf_table import HfFamily
from lm_trainer.models.no_rope import LayersWithoutRopeConfig, listed_or_every_nth, no_rope_from_hf, no_rope_to_hf
from lm_trainer.models.rope import AnyRope, DefaultRope, rope_from_hf
from lm_trainer.models.rotary import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    MLP,
    PRE_NORMS,
    TIED,
    common_fields_to_hf,
    heads_from_hf,
    hf_fields,
)
from lm_trainer.nn.spec import BlockSpec, DecoderSpec

_LAYERS = 36


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    num_layers = hf.get("num_hidden_layers") or _LAYERS
    no_rope = no_rope_from_hf(hf, num_layers)
    has_window, window = bool(hf.get("use_sliding_window")), hf.get("sliding_window")
    window = window if has_window else None
    windowed = listed_or_every_nth(no_rope["layers_without_rope"], no_rope["no_rope_layer_interval"], num_layers)
    kinds = ["sliding_attention" if window and layer in windowed else "full_attention" for layer in range(num_layers)]
    if (hf.get("layer_types") or kinds) != kinds:
        raise ValueError("layer_types is not supported where it differs from use_sliding_window and no_rope_layers")
    return {
        **no_rope,
        "sliding_window": window,
        "rope": rope_from_hf(hf, 2_000_000.0),
        **heads_from_hf(hf, kv_heads=4),
    }


def _to_hf(config: "SmolLm3Config") -> dict[str, Any]:
    without_rope, windowed = config.indices_without_rope, config.sliding_window is not None
    return {
        **no_rope_to_hf(config),
        "use_sliding_window": windowed,
        "sliding_window": config.sliding_window,
        "layer_types": [
            "sliding_attention" if windowed and layer in without_rope else "full_attention"
            for layer in range(config.num_layers)
        ],
        **common_fields_to_hf(config),
    }


class SmolLm3Config(LayersWithoutRopeConfig):
    """The SmolLM3 family; the defaults are SmolLM3 3B."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="smollm3",
        reference="HuggingFaceTB/SmolLM3-3B-Base",
        architecture="SmolLM3ForCausalLM",
        fields=hf_fields(
            hidden_size=2048,
            num_hidden_layers=_LAYERS,
            num_attention_heads=16,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
        ),
        tensors=(*EMBEDDING, HEAD, *PRE_NORMS, *ATTENTION, *MLP),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed={"attention_bias": False, "mlp_bias": False},
        inert={"attention_dropout": 0.0},
        read_only=("max_window_layers",),
        computed_from_hf=_from_hf,
        computed_to_hf=_to_hf,
        tied=TIED,
    )

    type: Literal["smollm3"] = "smollm3"
    """Name of the model family."""
    seq_len: int = Field(default=65536, gt=0)
    """Maximum sequence length in tokens."""
    num_layers: int = Field(default=_LAYERS, gt=0)
    """Number of blocks."""
    hidden_dim: int = Field(default=2048, gt=0)
    """Width of the residual stream."""
    num_heads: int = Field(default=16, gt=0)
    """Number of query heads."""
    num_kv_heads: int = Field(default=4, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads."""
    layer_norm_epsilon: float = Field(default=1e-6, gt=0)
    """Epsilon that is added to the mean square in the norms."""
    tie_word_embeddings: bool = True
    """Ties the weights of the output layer to the token embedding."""
    rope: AnyRope = DefaultRope(theta=5_000_000.0)
    """Rotary position embedding of the layers that have one."""
    sliding_window: int | None = Field(default=None, gt=0)
    """Number of positions that a layer without rotary positions can see, including the current one. Unset: all
    previous positions."""

    def spec(self, vocab_size: int) -> DecoderSpec:
        block = BlockSpec(self.attention_spec(), self.mlp_spec(), pre_norm=self.norm_spec())
        without_rope = replace(block, mixer=replace(block.attention, positions=None, window=self.sliding_window))
        indices = self.indices_without_rope
        layers = range(self.num_layers)
        return self.decoder_spec(vocab_size, tuple(without_rope if i in indices else block for i in layers))
