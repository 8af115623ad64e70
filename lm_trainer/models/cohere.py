"""Command R7B and Command A (Cohere 2025): attention and MLP read one LayerNorm in parallel. Most layers have rotary
positions and sliding windows; every fourth layer has full attention and no positions.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from lm_trainer.models.hf_table import HfFamily, HfField
from lm_trainer.models.rope import AnyRope, DefaultRope, rope_from_hf
from lm_trainer.models.rotary import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    MLP,
    TIED,
    RotaryConfig,
    common_fields_to_hf,
    heads_from_hf,
    hf_fields,
    layer_norm_tensors,
    layer_types,
    pattern_from_hf,
)
from lm_trainer.nn.spec import BlockSpec, DecoderSpec, NormSpec

_PATTERN = 4


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rope": rope_from_hf(hf),
        # An absent key means the default of transformers. A null is not valid: a layer without a window has no
        # positions.
        "sliding_window": hf.get("sliding_window", 4096),
        "sliding_window_pattern": pattern_from_hf(hf, _PATTERN),
        **heads_from_hf(hf, kv_heads=None),
    }


def _to_hf(config: "Cohere2Config") -> dict[str, Any]:
    return {
        "sliding_window": config.sliding_window,
        "sliding_window_pattern": config.sliding_window_pattern,
        "layer_types": layer_types(config.num_layers, config.sliding_window_pattern),
        **common_fields_to_hf(config),
    }


class Cohere2Config(RotaryConfig):
    """The Cohere 2 family; the defaults are Command R7B."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="cohere2",
        reference="CohereLabs/c4ai-command-r7b-12-2024",
        architecture="Cohere2ForCausalLM",
        fields=(
            *hf_fields(
                epsilon="layer_norm_eps",
                hidden_size=8192,
                intermediate_size=22528,
                num_hidden_layers=40,
                num_attention_heads=64,
                max_position_embeddings=8192,
                layer_norm_eps=1e-5,
                tie_word_embeddings=True,
            ),
            HfField("logit_scale", "logit_scale", 0.0625),
        ),
        tensors=(*EMBEDDING, HEAD, *layer_norm_tensors(attention_pre_norm="input_layernorm"), *ATTENTION, *MLP),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed={"attention_bias": False},
        inert={"attention_dropout": 0.0},
        read_only=(
            *("layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct"),
            *("use_embedding_sharing", "use_gated_activation", "use_parallel_block"),
        ),
        computed_from_hf=_from_hf,
        computed_to_hf=_to_hf,
        tied=TIED,
    )

    type: Literal["cohere2"] = "cohere2"
    """Name of the model family."""
    seq_len: int = Field(default=8192, gt=0)
    """Maximum sequence length in tokens."""
    intermediate_dim: int = Field(default=14336, gt=0)
    """Width of the MLP."""
    num_kv_heads: int = Field(default=8, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads."""
    layer_norm_epsilon: float = Field(default=1e-5, gt=0)
    """Epsilon that is added to the variance in the norms."""
    tie_word_embeddings: bool = True
    """Ties the weights of the output layer to the token embedding."""
    rope: AnyRope = DefaultRope(theta=50_000.0)
    """Rotary position embedding of the layers with a window. The other layers have no positions."""
    sliding_window: int = Field(default=4096, gt=0)
    """Number of positions that a layer with a window can see, including the current one."""
    sliding_window_pattern: int = Field(default=_PATTERN, gt=0)
    """Every n-th layer attends to all positions. The other layers have a window."""
    logit_scale: float = Field(default=0.25, gt=0)
    """Factor of the logits."""

    def norm_spec(self) -> NormSpec:
        return NormSpec(eps=self.layer_norm_epsilon, bias=False)

    def spec(self, vocab_size: int) -> DecoderSpec:
        plain = self.attention_spec()
        rope = replace(self.rope.spec(self.seq_len), interleaved=True)
        full = BlockSpec(
            replace(plain, positions=None), self.mlp_spec(), pre_norm=self.norm_spec(), parallel=True, shared_norm=True
        )
        local = replace(full, mixer=replace(plain, positions=rope, window=self.sliding_window))
        kinds = layer_types(self.num_layers, self.sliding_window_pattern)
        blocks = tuple(full if kind == "full_attention" else local for kind in kinds)
        return self.decoder_spec(vocab_size, blocks, logit_scale=self.logit_scale)
