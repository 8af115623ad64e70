"""gpt-oss (OpenAI 2025, arXiv 2508.10925): experts with biases and a clamped activation, layers with a window in turn
with layers that see everything, and attention sinks.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from lm_trainer.models.experts import GroupedExpertsConfig
from lm_trainer.models.hf_table import HfFamily, HfField, HfTensor
from lm_trainer.models.rope import AnyRope, YarnRope, rope_from_hf
from lm_trainer.models.rotary import (
    ATTENTION,
    BLOCK,
    EMBEDDING,
    HEAD,
    LAYER,
    PRE_NORMS,
    TIED,
    common_fields_to_hf,
    heads_from_hf,
    hf_fields_of_one_activation,
    layer_types,
    pattern_from_hf,
)
from lm_trainer.nn.expert_spec import ClampedGluSpec, RouterSpec
from lm_trainer.nn.spec import BlockSpec, DecoderSpec

_THETA = 150_000.0
_ROPE = YarnRope(theta=_THETA, factor=32.0, original_max_position_embeddings=4096, truncate=False)

# All experts of a layer are one tensor, with inputs before outputs. Each column of the gate is followed by the column
# of the linear term.
_EXPERTS = (
    HfTensor(f"{LAYER}.mlp.router.weight", (f"{BLOCK}.mlp.router",), transposed=True),
    HfTensor(f"{LAYER}.mlp.router.bias", (f"{BLOCK}.mlp.router_bias",)),
    HfTensor(f"{LAYER}.mlp.experts.gate_up_proj", (f"{BLOCK}.mlp.gate", f"{BLOCK}.mlp.up"), interleaved=True),
    HfTensor(
        f"{LAYER}.mlp.experts.gate_up_proj_bias", (f"{BLOCK}.mlp.gate_bias", f"{BLOCK}.mlp.up_bias"), interleaved=True
    ),
    HfTensor(f"{LAYER}.mlp.experts.down_proj", (f"{BLOCK}.mlp.down",)),
    HfTensor(f"{LAYER}.mlp.experts.down_proj_bias", (f"{BLOCK}.mlp.down_bias",)),
)


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    has_rope = hf.get("rope_parameters") or hf.get("rope_scaling")
    return {
        "rope": rope_from_hf(hf if has_rope else {**hf, "rope_parameters": _ROPE.to_hf()}, _THETA),
        "sliding_window_pattern": pattern_from_hf(hf, 2),
        **heads_from_hf(hf, kv_heads=8, head_dim=64),
    }


def _to_hf(config: "GptOssConfig") -> dict[str, Any]:
    return {
        "layer_types": layer_types(config.num_layers, config.sliding_window_pattern),
        **common_fields_to_hf(config),
    }


class GptOssConfig(GroupedExpertsConfig):
    """The gpt-oss family; the defaults are gpt-oss 20B."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="gpt_oss",
        reference="openai/gpt-oss-20b",
        architecture="GptOssForCausalLM",
        fields=(
            *hf_fields_of_one_activation(
                hidden_size=2880,
                intermediate_size=2880,
                num_hidden_layers=36,
                num_attention_heads=64,
                max_position_embeddings=131072,
                rms_norm_eps=1e-5,
            ),
            HfField("attention_bias", "use_bias", True),
            HfField("sliding_window", "sliding_window", 128),
            HfField("num_local_experts", "n_routed_experts", 128, old_names=("num_experts",)),
            HfField("num_experts_per_tok", "num_experts_per_tok", 4),
            HfField("swiglu_alpha", "swiglu_alpha", 1.702),
            HfField("swiglu_limit", "swiglu_limit", 7.0),
            HfField("router_aux_loss_coef", "lbl_coef", 0.001),
        ),
        tensors=(
            *EMBEDDING,
            HEAD,
            *PRE_NORMS,
            *ATTENTION,
            HfTensor(f"{LAYER}.self_attn.sinks", (f"{BLOCK}.attention.sinks",)),
            *_EXPERTS,
        ),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed={},
        # transformers never reads this activation.
        inert={"attention_dropout": 0.0, "hidden_act": "silu"},
        read_only=("experts_per_token", "initial_context_length"),
        computed_from_hf=_from_hf,
        computed_to_hf=_to_hf,
        tied=TIED,
    )

    # The experts have an activation of their own.
    activation_function: ClassVar[Literal["silu"]] = "silu"  # pyright: ignore[reportIncompatibleVariableOverride]

    type: Literal["gpt_oss"] = "gpt_oss"
    """Name of the model family."""
    seq_len: int = Field(default=131072, gt=0)
    """Maximum sequence length in tokens."""
    num_layers: int = Field(default=24, gt=0)
    """Number of blocks."""
    hidden_dim: int = Field(default=2880, gt=0)
    """Width of the residual stream."""
    intermediate_dim: int = Field(default=2880, gt=0)
    """Width of each expert."""
    num_heads: int = Field(default=64, gt=0)
    """Number of query heads."""
    num_kv_heads: int = Field(default=8, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads."""
    head_dim: int | None = Field(default=64, gt=0, multiple_of=2)
    """Number of dimensions per head. `null`: hidden_dim / num_heads."""
    rope: AnyRope = _ROPE
    """Rotary position embedding (RoPE)."""
    use_bias: bool = True
    """Adds biases to queries, keys, values and the output of attention."""
    sliding_window: int = Field(default=128, gt=0)
    """Number of positions that a layer with a window can see, including the current one."""
    sliding_window_pattern: int = Field(default=2, gt=0)
    """Every n-th layer attends to all positions. The other layers have a window."""
    n_routed_experts: int = Field(default=32, gt=0)
    """Number of experts in each layer."""
    num_experts_per_tok: int = Field(default=4, gt=0)
    """Number of experts that process each token."""
    swiglu_alpha: float = Field(default=1.702, gt=0)
    """Factor of the argument of the sigmoid in the activation g sigmoid(alpha g) (u + 1) of the experts."""
    swiglu_limit: float = Field(default=7.0, gt=0)
    """Upper bound of g, and bound of the absolute value of u."""

    def spec(self, vocab_size: int) -> DecoderSpec:
        full = replace(self.attention_spec(), bias=self.use_bias, out_bias=self.use_bias, sinks=True)
        # The softmax of only the highest logits is the softmax of all, normalized over the selected experts.
        experts = replace(
            self.moe_spec(self.intermediate_dim, router=RouterSpec(renormalize=True, logit_bias=True)),
            glu=ClampedGluSpec(self.swiglu_alpha, self.swiglu_limit),
            bias=True,
        )
        kinds = {"full_attention": full, "sliding_attention": replace(full, window=self.sliding_window)}
        blocks = tuple(
            BlockSpec(kinds[kind], experts, pre_norm=self.norm_spec())
            for kind in layer_types(self.num_layers, self.sliding_window_pattern)
        )
        return self.decoder_spec(vocab_size, blocks)
