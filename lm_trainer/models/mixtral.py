"""Mixtral (Jiang et al. 2024): a mixture of experts instead of every MLP."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from lm_trainer.models.experts import ExpertsConfig, expert_tensors
from lm_trainer.models.hf_table import HfFamily, HfField
from lm_trainer.models.rope import AnyRope, DefaultRope, rope_from_hf
from lm_trainer.models.rotary import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    LAYER,
    PRE_NORMS,
    TIED,
    common_fields_to_hf,
    heads_from_hf,
    hf_fields,
)
from lm_trainer.nn.spec import BlockSpec, DecoderSpec

# Names from the authors' code. w2 is the down projection, and w3 is the factor of the activation of w1.
_NAMES = {"gate": "w1", "down": "w2", "up": "w3"}


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    rope = rope_from_hf(hf, 1_000_000.0)
    return {"sliding_window": hf.get("sliding_window"), "rope": rope, **heads_from_hf(hf, kv_heads=8)}


def _to_hf(config: "MixtralConfig") -> dict[str, Any]:
    return {"sliding_window": config.sliding_window, **common_fields_to_hf(config)}


class MixtralConfig(ExpertsConfig):
    """The Mixtral family; the defaults are Mixtral 8x7B."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="mixtral",
        reference="mistralai/Mixtral-8x7B-v0.1",
        architecture="MixtralForCausalLM",
        fields=(
            *hf_fields(intermediate_size=14336, max_position_embeddings=131072, rms_norm_eps=1e-5),
            HfField("num_local_experts", "n_routed_experts", 8),
            HfField("num_experts_per_tok", "num_experts_per_tok", 2),
            HfField("router_aux_loss_coef", "lbl_coef", 0.001),
        ),
        tensors=(
            *EMBEDDING,
            HEAD,
            *PRE_NORMS,
            *ATTENTION,
            *expert_tensors(f"{LAYER}.block_sparse_moe.gate", f"{LAYER}.block_sparse_moe.experts", _NAMES),
        ),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed={},
        inert={"attention_dropout": 0.0, "router_jitter_noise": 0.0},
        computed_from_hf=_from_hf,
        computed_to_hf=_to_hf,
        tied=TIED,
    )

    type: Literal["mixtral"] = "mixtral"
    """Name of the model family."""
    seq_len: int = Field(default=32768, gt=0)
    """Maximum sequence length in tokens."""
    intermediate_dim: int = Field(default=14336, gt=0)
    """Width of each expert."""
    num_kv_heads: int = Field(default=8, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads."""
    rope: AnyRope = DefaultRope(theta=1_000_000.0)
    """Rotary position embedding (RoPE)."""
    sliding_window: int | None = Field(default=None, gt=0)
    """Number of positions that attention can see, including the current one. Unset: all previous positions."""

    def spec(self, vocab_size: int) -> DecoderSpec:
        attention = replace(self.attention_spec(), window=self.sliding_window)
        block = BlockSpec(attention, self.moe_spec(self.intermediate_dim), pre_norm=self.norm_spec())
        return self.decoder_spec(vocab_size, (block,) * self.num_layers)
