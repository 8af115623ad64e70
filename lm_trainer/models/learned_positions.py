"""Settings of families with learned positions, LayerNorm before each sublayer and a tied head."""

from dataclasses import replace
from typing import Self

from pydantic import Field, model_validator

from lm_trainer.models.base import ActivationName
from lm_trainer.models.equal_heads import EqualHeadsConfig
from lm_trainer.nn.spec import AttentionSpec, BlockSpec, DecoderSpec, EmbeddingSpec, MlpSpec, NormSpec, ScoreSpec

FLASH_BLOCK = 1024


class LearnedPositionsConfig(EqualHeadsConfig):
    """Settings of a decoder with learned positions."""

    mlp_scale: int = Field(default=4, gt=0)
    """Width of the MLP, in multiples of hidden_dim."""
    embed_pdrop: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate after the embeddings."""
    activation_function: ActivationName = "gelu_new"
    """Activation of the MLP: gelu (exact), gelu_new (its tanh approximation), quick_gelu, relu, relu2 (its square),
    silu or tanh."""
    scale_attn_by_inverse_layer_idx: bool = False
    """Divides the attention scores of layer i (from 0) by i + 1."""
    use_bias: bool = True
    """Adds biases to the linear layers and LayerNorm. A model without them cannot be exported to Hugging Face."""
    use_flash_attention: bool | None = None
    """Avoids saving sequence x sequence attention scores. `true` means `flash_attention_block_size: 1024` unless that
    key is set. `false` forbids setting it. Unset: depends on `flash_attention_block_size`."""

    @model_validator(mode="after")
    def _check_flash_agrees(self) -> Self:
        if self.use_flash_attention is False and self.flash_attention_block_size is not None:
            raise ValueError(
                f"use_flash_attention: false contradicts flash_attention_block_size: "
                f"{self.flash_attention_block_size}; remove one of them"
            )
        return self

    def norm_spec(self) -> NormSpec:
        """Spec of the norms of this model."""
        return NormSpec(eps=self.layer_norm_epsilon, bias=self.use_bias)

    def mlp_spec(self, scale: int) -> MlpSpec:
        """Builds the spec of an MLP that is `scale` times as wide as the model."""
        return MlpSpec(hidden_dim=self.hidden_dim * scale, activation=self.activation_function, bias=self.use_bias)

    def resolved_score_spec(self) -> ScoreSpec:
        """Builds the `ScoreSpec` of every layer, with `use_flash_attention` resolved."""
        return replace(
            self.score_spec(dropout=self.attn_pdrop),
            block_size=self.flash_attention_block_size or (FLASH_BLOCK if self.use_flash_attention else None),
        )

    def backbone_spec(self, vocab_size: int) -> DecoderSpec:
        """Builds the spec of the plain decoder, without additions of the family."""
        scores = replace(self.resolved_score_spec(), inverse_layer=self.scale_attn_by_inverse_layer_idx)
        attention = AttentionSpec(
            self.num_heads, self.head_size, bias=self.use_bias, out_bias=self.use_bias, scores=scores
        )
        norm = self.norm_spec()
        block = BlockSpec(attention, self.mlp_spec(self.mlp_scale), pre_norm=norm, dropout=self.resid_pdrop)
        embedding = EmbeddingSpec(learned_positions=True, dropout=self.embed_pdrop)
        return self.decoder_spec(vocab_size, block, norm, embedding=embedding)
