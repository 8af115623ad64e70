"""nanochat (Karpathy 2025): norms without gains, also of the embeddings, queries and keys; an MLP without a gate, whose
activation is the square of ReLU; bounded logits.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from lm_trainer.models.base import ActivationName
from lm_trainer.models.hf_table import HfFamily, HfTensor, linear_tensors
from lm_trainer.models.rope import normalized_rotation, rope_from_hf
from lm_trainer.models.rotary import (
    ATTENTION,
    BLOCK,
    HEAD,
    LAYER,
    TIED,
    RotaryConfig,
    common_fields_to_hf,
    heads_from_hf,
    hf_fields,
)
from lm_trainer.nn.spec import BlockSpec, DecoderSpec, EmbeddingSpec, MlpSpec, NormSpec

_MLP = (
    *linear_tensors(f"{LAYER}.mlp.fc1", f"{BLOCK}.mlp.up"),
    *linear_tensors(f"{LAYER}.mlp.fc2", f"{BLOCK}.mlp.down"),
)


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rope": rope_from_hf(hf),
        # A null in the file means no cap, and an absent key means the default.
        "final_logit_softcapping": hf.get("final_logit_softcapping", 15.0),
        **heads_from_hf(hf, kv_heads=None),
    }


def _to_hf(config: "NanochatConfig") -> dict[str, Any]:
    return {"final_logit_softcapping": config.final_logit_softcapping, **common_fields_to_hf(config)}


class NanochatConfig(RotaryConfig):
    """The nanochat family; the defaults are its model with 20 layers."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="nanochat",
        reference="karpathy/nanochat-d32",
        architecture="NanoChatForCausalLM",
        fields=hf_fields(
            hidden_size=768,
            intermediate_size=8192,
            num_hidden_layers=12,
            num_attention_heads=6,
            hidden_act="relu2",
        ),
        tensors=(HfTensor("embed_tokens.weight", ("embed.tokens",)), HEAD, *ATTENTION, *_MLP),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed={"attention_bias": False},
        inert={"attention_dropout": 0.0},
        computed_from_hf=_from_hf,
        computed_to_hf=_to_hf,
        tied=TIED,
    )

    type: Literal["nanochat"] = "nanochat"
    """Name of the model family."""
    num_layers: int = Field(default=20, gt=0)
    """Number of blocks."""
    hidden_dim: int = Field(default=1280, gt=0)
    """Width of the residual stream."""
    intermediate_dim: int = Field(default=5120, gt=0)
    """Width of the MLP."""
    num_heads: int = Field(default=10, gt=0)
    """Number of query heads."""
    num_kv_heads: int = Field(default=10, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads."""
    activation_function: ActivationName = "relu2"
    """Activation of the MLP: gelu (exact), gelu_new (its tanh approximation), quick_gelu, relu, relu2 (its square),
    silu or tanh."""
    layer_norm_epsilon: float = Field(default=1e-6, gt=0)
    """Epsilon that is added to the mean square in the norms."""
    final_logit_softcapping: float | None = Field(default=15.0, gt=0)
    """The cap c that bounds the logits l to c * tanh(l / c); `null`: no bound."""

    def norm_spec(self) -> NormSpec:
        return replace(super().norm_spec(), scale=False)

    def mlp_spec(self) -> MlpSpec:
        return replace(super().mlp_spec(), gated=False)

    def spec(self, vocab_size: int) -> DecoderSpec:
        norm = self.norm_spec()
        rope, qk_norm = normalized_rotation(self.rope.spec(self.seq_len), norm)
        attention = replace(self.attention_spec(), positions=replace(rope, backward=True), qk_norm=qk_norm)
        block = BlockSpec(attention, self.mlp_spec(), pre_norm=norm)
        return self.decoder_spec(
            vocab_size,
            (block,) * self.num_layers,
            embedding=EmbeddingSpec(norm=norm),
            softcap=self.final_logit_softcapping,
        )
