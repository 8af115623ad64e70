"""SmolLM3 (Bakouch et al. 2025): Llama's parts, but every fourth layer has no positions (Yang et al. 2025, arXiv
2501.18795).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lm_trainer.models.hf_table import HfFamily
from lm_trainer.models.rope import AnyRope, DefaultRope, rope_from_hf
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

_INTERVAL, _LAYERS = 4, 36


def _every_nth_layer(interval: int, num_layers: int) -> tuple[int, ...]:
    return tuple(range(interval - 1, num_layers, interval))


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, interval = hf.get("num_hidden_layers") or _LAYERS, hf.get("no_rope_layer_interval") or _INTERVAL
    listed = without_rope = None
    # In the file, 1 means rotary positions, and the list may be longer than the model.
    if (flags := hf.get("no_rope_layers")) is not None:
        listed = tuple(layer for layer, has_rope in enumerate(flags[:num_layers]) if not has_rope)
        without_rope = None if listed == _every_nth_layer(interval, num_layers) else listed
    has_window, window = bool(hf.get("use_sliding_window")), hf.get("sliding_window")
    window = window if has_window else None
    windowed = _every_nth_layer(interval, num_layers) if listed is None else listed
    kinds = ["sliding_attention" if window and layer in windowed else "full_attention" for layer in range(num_layers)]
    if (hf.get("layer_types") or kinds) != kinds:
        raise ValueError("layer_types is not supported where it differs from use_sliding_window and no_rope_layers")
    return {
        "no_rope_layer_interval": interval,
        "layers_without_rope": without_rope,
        "sliding_window": window,
        "rope": rope_from_hf(hf, 2_000_000.0),
        **heads_from_hf(hf, kv_heads=4),
    }


def _to_hf(config: "SmolLm3Config") -> dict[str, Any]:
    without_rope, windowed = config.indices_without_rope, config.sliding_window is not None
    layers = range(config.num_layers)
    return {
        "no_rope_layers": [int(layer not in without_rope) for layer in layers],
        "no_rope_layer_interval": config.no_rope_layer_interval,
        "use_sliding_window": windowed,
        "sliding_window": config.sliding_window,
        "layer_types": [
            "sliding_attention" if windowed and layer in without_rope else "full_attention" for layer in layers
        ],
        **common_fields_to_hf(config),
    }


class SmolLm3Config(RotaryConfig):
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
    no_rope_layer_interval: int = Field(default=_INTERVAL, gt=0)
    """Every n-th layer has no positions, unless `layers_without_rope` lists these layers."""
    layers_without_rope: tuple[int, ...] | None = None
    """Indices, counted from 0, of the layers without positions. Unset: every n-th layer (`no_rope_layer_interval`)."""
    sliding_window: int | None = Field(default=None, gt=0)
    """Number of positions that a layer without rotary positions can see, including the current one. Unset: all
    previous positions."""

    @model_validator(mode="after")
    def _check_layers_exist(self) -> "SmolLm3Config":
        listed = self.layers_without_rope or ()
        if missing := [layer for layer in listed if not 0 <= layer < self.num_layers]:
            raise ValueError(f"layers_without_rope lists {missing}, but layers have indices 0 to {self.num_layers - 1}")
        return self

    @property
    def indices_without_rope(self) -> tuple[int, ...]:
        """`layers_without_rope` with its default resolved."""
        every_nth = _every_nth_layer(self.no_rope_layer_interval, self.num_layers)
        return every_nth if self.layers_without_rope is None else self.layers_without_rope

    def spec(self, vocab_size: int) -> DecoderSpec:
        block = BlockSpec(self.attention_spec(), self.mlp_spec(), pre_norm=self.norm_spec())
        without_rope = replace(block, mixer=replace(block.attention, positions=None, window=self.sliding_window))
        indices = self.indices_without_rope
        layers = range(self.num_layers)
        return self.decoder_spec(vocab_size, tuple(without_rope if i in indices else block for i in layers))
