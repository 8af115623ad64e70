"""Settings of families whose heads split the hidden dimension equally, and each have their own keys and values."""

from typing import Self

from pydantic import Field, model_validator

from lm_trainer.models.base import DecoderConfig
from lm_trainer.nn.spec import BlockSpec, DecoderSpec, EmbeddingSpec, HeadSpec, NormSpec


class EqualHeadsConfig(DecoderConfig):
    """Settings of a decoder with heads of size hidden_dim / num_heads, and with dropout."""

    hidden_dim: int = Field(default=768, gt=0)
    """Width of the residual stream; must be a multiple of num_heads."""
    num_heads: int = Field(default=12, gt=0)
    """Number of attention heads, each of size hidden_dim / num_heads."""
    initializer_range: float = Field(default=0.02, ge=0)
    """Standard deviation of the initial weights. Weights that write to the residual stream are initialised with this
    divided by sqrt(2 * num_layers)."""
    layer_norm_epsilon: float = Field(default=1e-5, gt=0)
    """Epsilon that is added to the variance in LayerNorm."""
    resid_pdrop: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the outputs of attention and MLP, before they are added to the residual stream."""
    attn_pdrop: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the attention probabilities."""

    @model_validator(mode="after")
    def _check_heads_divide(self) -> Self:
        if self.hidden_dim % self.num_heads:
            raise ValueError(f"hidden_dim={self.hidden_dim} is not a multiple of num_heads={self.num_heads}")
        return self

    @property
    def head_size(self) -> int:
        """Number of dimensions per head."""
        return self.hidden_dim // self.num_heads

    def decoder_spec(
        self,
        vocab_size: int,
        block: BlockSpec,
        norm: NormSpec,
        *,
        embedding: EmbeddingSpec | None = None,
        tied: bool = True,
    ) -> DecoderSpec:
        """Builds the spec of a model with `num_layers` equal blocks, and `norm` after the last block."""
        return DecoderSpec(
            vocab_size=vocab_size,
            hidden_dim=self.hidden_dim,
            num_positions=self.seq_len,
            blocks=(block,) * self.num_layers,
            final_norm=norm,
            embedding=embedding or EmbeddingSpec(),
            head=HeadSpec(tied=tied),
            init_std=self.initializer_range,
            scan=self.scan,
            remat=self.remat,
            remat_groups=self.remat_groups,
        )
