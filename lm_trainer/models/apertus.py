"""Apertus (Apertus team 2025): Llama's attention with normalized queries and keys, and an MLP without a gate, whose
activation xIELU has two learned scalars per layer.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from lm_trainer.models.base import ActivationName
from lm_trainer.models.hf_table import HfFamily, HfTensor
from lm_trainer.models.rope import AnyRope, Llama3Rope, rope_from_hf
from lm_trainer.models.rotary import (
    ATTENTION,
    BLOCK,
    EMBEDDING,
    HEAD,
    LAYER,
    MLP,
    QK_NORM,
    TIED,
    RotaryConfig,
    common_fields_to_hf,
    heads_from_hf,
    hf_fields,
    layer_norm_tensors,
)
from lm_trainer.nn.spec import BlockSpec, DecoderSpec, MlpSpec, QkNormSpec, XieluSpec

_NORMS = layer_norm_tensors(attention_pre_norm="attention_layernorm", mlp_pre_norm="feedforward_layernorm")
_SCALARS = tuple(
    HfTensor(f"{LAYER}.mlp.act_fn.{name}", (f"{BLOCK}.mlp.activation.{name}",)) for name in ("alpha_p", "alpha_n")
)
_XIELU = XieluSpec()
_ROPE = Llama3Rope(theta=12_000_000.0)


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    # The default of transformers, even for the theta of a file that does not mention any scaling.
    has_block = hf.get("rope_parameters") or hf.get("rope_scaling")
    return {"rope": rope_from_hf(hf, _ROPE.theta) if has_block else _ROPE, **heads_from_hf(hf, kv_heads=None)}


class ApertusConfig(RotaryConfig):
    """The Apertus family; the defaults are Apertus 8B."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="apertus",
        reference="swiss-ai/Apertus-8B-2509",
        architecture="ApertusForCausalLM",
        fields=hf_fields(intermediate_size=14336, hidden_act="xielu", max_position_embeddings=65536, rms_norm_eps=1e-5),
        tensors=(*EMBEDDING, HEAD, *_NORMS, *ATTENTION, *QK_NORM, *MLP, *_SCALARS),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed={"attention_bias": False},
        inert={"attention_dropout": 0.0},
        read_only=("qk_norm",),
        computed_from_hf=_from_hf,
        computed_to_hf=common_fields_to_hf,
        ignored=r"layers\.\d+\.mlp\.act_fn\.(beta|eps)",
        # transformers limits negative inputs to eps. Without the limit, xIELU differs by 1e-6, and only near 0.
        constants={f"{LAYER}.mlp.act_fn.beta": _XIELU.slope, f"{LAYER}.mlp.act_fn.eps": -1e-6},
        tied=TIED,
    )

    type: Literal["apertus"] = "apertus"
    """Name of the model family."""
    seq_len: int = Field(default=65536, gt=0)
    """Maximum sequence length in tokens."""
    intermediate_dim: int = Field(default=21504, gt=0)
    """Width of the MLP."""
    num_kv_heads: int = Field(default=8, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads."""
    activation_function: ActivationName | Literal["xielu"] = "xielu"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Activation of the MLP: xielu, gelu (exact), gelu_new (its tanh approximation), quick_gelu, relu, relu2 (its
    square), silu or tanh. xielu has two learned scalars in each layer."""
    rope: AnyRope = _ROPE
    """Rotary position embedding (RoPE)."""

    def mlp_spec(self) -> MlpSpec:
        name = self.activation_function
        return MlpSpec(self.intermediate_dim, _XIELU if name == "xielu" else name, bias=False)

    def spec(self, vocab_size: int) -> DecoderSpec:
        norm = self.norm_spec()
        attention = replace(self.attention_spec(), qk_norm=QkNormSpec(norm))
        block = BlockSpec(attention, self.mlp_spec(), pre_norm=norm)
        return self.decoder_spec(vocab_size, (block,) * self.num_layers)
