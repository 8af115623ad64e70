"""Qwen3 with experts (Yang et al. 2025): a mixture of many small experts instead of most MLPs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lm_trainer.models.experts import ExpertsConfig, expert_tensors
from lm_trainer.models.hf_table import HfFamily, HfField
from lm_trainer.models.rope import rope_from_hf
from lm_trainer.models.rotary import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    LAYER,
    MLP,
    PRE_NORMS,
    QK_NORM,
    TIED,
    common_fields_to_hf,
    heads_from_hf,
    hf_fields,
)
from lm_trainer.nn.expert_spec import RouterSpec
from lm_trainer.nn.spec import BlockSpec, DecoderSpec, QkNormSpec


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    experts = hf.get("num_experts") or hf.get("num_local_experts") or 128
    return {
        "n_routed_experts": experts,
        "mlp_only_layers": tuple(hf.get("mlp_only_layers") or ()),
        "sliding_window": hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None,
        "rope": rope_from_hf(hf),
        **heads_from_hf(hf, kv_heads=4),
    }


def _to_hf(config: "Qwen3MoeConfig") -> dict[str, Any]:
    return {
        "num_experts": config.n_routed_experts,
        "mlp_only_layers": list(config.mlp_only_layers),
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        **common_fields_to_hf(config),
    }


def check_layers_exist(layers: Sequence[int], num_layers: int, *, name: str = "mlp_only_layers") -> None:
    """Raises `ValueError` if the setting `name` lists a layer that the model does not have."""
    if wrong := [layer for layer in layers if not 0 <= layer < num_layers]:
        raise ValueError(f"{name}: there is no layer {wrong[0]}; they are 0 to {num_layers - 1}")


def dense_layers(num_layers: int, sparse_step: int, mlp_only_layers: Sequence[int]) -> list[bool]:
    """Returns True for each layer with a plain MLP instead of experts."""
    # transformers counts the layers from 1 for the step, but from 0 in `mlp_only_layers`.
    return [layer in mlp_only_layers or (layer + 1) % sparse_step != 0 for layer in range(num_layers)]


class Qwen3MoeConfig(ExpertsConfig):
    """The Qwen3 family with experts; the defaults are the defaults of transformers."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="qwen3_moe",
        reference="Qwen/Qwen3-30B-A3B-Base",
        architecture="Qwen3MoeForCausalLM",
        fields=(
            *hf_fields(hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, max_position_embeddings=32768),
            HfField("moe_intermediate_size", "moe_intermediate_dim", 768),
            HfField("num_experts_per_tok", "num_experts_per_tok", 8),
            HfField("norm_topk_prob", "norm_topk_prob", False),
            HfField("decoder_sparse_step", "decoder_sparse_step", 1),
            HfField("router_aux_loss_coef", "lbl_coef", 0.001),
        ),
        tensors=(
            *EMBEDDING,
            HEAD,
            *PRE_NORMS,
            *ATTENTION,
            *QK_NORM,
            *MLP,
            *expert_tensors(f"{LAYER}.mlp.gate", f"{LAYER}.mlp.experts"),
        ),
        prefix="model.",
        unprefixed=(HEAD.hf,),
        fixed={"attention_bias": False},
        inert={"attention_dropout": 0.0},
        read_only=("num_local_experts", "layer_types", "max_window_layers"),
        computed_from_hf=_from_hf,
        computed_to_hf=_to_hf,
        tied=TIED,
    )

    type: Literal["qwen3_moe"] = "qwen3_moe"
    """Name of the model family."""
    seq_len: int = Field(default=32768, gt=0)
    """Maximum sequence length in tokens."""
    hidden_dim: int = Field(default=2048, gt=0)
    """Width of the residual stream."""
    num_layers: int = Field(default=24, gt=0)
    """Number of blocks."""
    num_kv_heads: int = Field(default=4, gt=0)
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads."""
    intermediate_dim: int = Field(default=6144, gt=0)
    """Width of the MLP of layers without experts."""
    moe_intermediate_dim: int = Field(default=768, gt=0)
    """Width of each expert."""
    n_routed_experts: int = Field(default=128, gt=0)
    num_experts_per_tok: int = Field(default=8, gt=0)
    norm_topk_prob: bool = False
    """Normalizes the weights of a token's experts to sum to 1."""
    decoder_sparse_step: int = Field(default=1, gt=0)
    """Every n-th layer has experts. The other layers have a plain MLP."""
    mlp_only_layers: tuple[int, ...] = ()
    """Indices of layers, counted from 0, that always have a plain MLP."""
    sliding_window: int | None = Field(default=None, gt=0)
    """Number of positions that attention can see, including the current one. Unset: all previous positions."""

    @model_validator(mode="after")
    def _check_layers_exist(self) -> "Qwen3MoeConfig":
        check_layers_exist(self.mlp_only_layers, self.num_layers)
        return self

    def spec(self, vocab_size: int) -> DecoderSpec:
        norm = self.norm_spec()
        attention = replace(self.attention_spec(), qk_norm=QkNormSpec(norm), window=self.sliding_window)
        plain = BlockSpec(attention, self.mlp_spec(), pre_norm=norm)
        router = RouterSpec(renormalize=self.norm_topk_prob)
        sparse = replace(plain, mlp=self.moe_spec(self.moe_intermediate_dim, router=router))
        dense = dense_layers(self.num_layers, self.decoder_sparse_step, self.mlp_only_layers)
        return self.decoder_spec(vocab_size, tuple(plain if is_dense else sparse for is_dense in dense))
