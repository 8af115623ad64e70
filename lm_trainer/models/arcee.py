"""Arcee's AFM (Arcee AI 2025): Llama's parts, but an MLP without a gate, whose activation is the square of ReLU."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from lm_trainer.models.base import ActivationName
from lm_trainer.models.hf_table import HfFamily
from lm_trainer.models.rope import rope_from_hf
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
from lm_trainer.nn.spec import BlockSpec, DecoderSpec, MlpSpec


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope": rope_from_hf(hf), **heads_from_hf(hf, kv_heads=None)}


class ArceeConfig(RotaryConfig):
    """The family of Arcee's AFM; the defaults are the defaults of transformers."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="arcee",
        reference="arcee-ai/AFM-4.5B-Base",
        architecture="ArceeForCausalLM",
        fields=hf_fields(
            hidden_size=2560,
            intermediate_size=18432,
            hidden_act="relu2",
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
        ),
        tensors=(*EMBEDDING, HEAD, *PRE_NORMS, *ATTENTION, *MLP),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed={"attention_bias": False, "mlp_bias": False},
        inert={"attention_dropout": 0.0},
        computed_from_hf=_from_hf,
        computed_to_hf=common_fields_to_hf,
        tied=TIED,
    )

    type: Literal["arcee"] = "arcee"
    """Name of the model family."""
    seq_len: int = Field(default=4096, gt=0)
    """Maximum sequence length in tokens."""
    hidden_dim: int = Field(default=2560, gt=0)
    """Width of the residual stream."""
    intermediate_dim: int = Field(default=18432, gt=0)
    """Width of the MLP."""
    activation_function: ActivationName = "relu2"
    """Activation of the MLP: gelu (exact), gelu_new (its tanh approximation), quick_gelu, relu, relu2 (its square),
    silu or tanh."""

    def mlp_spec(self) -> MlpSpec:
        return replace(super().mlp_spec(), gated=False)

    def spec(self, vocab_size: int) -> DecoderSpec:
        block = BlockSpec(self.attention_spec(), self.mlp_spec(), pre_norm=self.norm_spec())
        return self.decoder_spec(vocab_size, (block,) * self.num_layers)
