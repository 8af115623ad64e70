"""Backpack language models (Hewitt et al. 2023): each token has several sense vectors that depend only on the token. A
GPT-2 backbone computes the weight of each sense, and the weighted sum predicts the next token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from lm_trainer.models.hf_table import NoHfFormat
from lm_trainer.models.learned_positions import LearnedPositionsConfig
from lm_trainer.nn.spec import AttentionSpec, DecoderSpec, SenseSpec

if TYPE_CHECKING:
    from lm_trainer.nn.senses import SenseDecoder


class BackpackConfig(LearnedPositionsConfig):
    """The Backpack family; the defaults are the small model of the paper. It has no Hugging Face format, because the
    published models need their own code.
    """

    hf: ClassVar[NoHfFormat] = NoHfFormat(
        model_type="backpack-gpt2",
        reason="transformers has no such model: those that are published bring their own code, which is never run; "
        "lm_trainer's own checkpoints keep it",
    )

    type: Literal["backpack"] = "backpack"
    """Name of the model family."""
    seq_len: int = Field(default=512, gt=0)
    """Maximum sequence length in tokens."""
    use_bias: bool = True
    """Adds biases to the linear layers and LayerNorm."""
    num_senses: int = Field(default=16, gt=0)
    """Number of sense vectors per token; must divide hidden_dim."""
    sense_intermediate_scale: int = Field(default=4, gt=0)
    """Width of the MLP that makes the sense vectors, in multiples of hidden_dim. The MLP before it has `mlp_scale`."""

    @model_validator(mode="after")
    def _check_senses_divide(self) -> Self:
        if self.hidden_dim % self.num_senses:
            raise ValueError(f"hidden_dim={self.hidden_dim} is not a multiple of num_senses={self.num_senses}")
        return self

    @classmethod
    def module(cls) -> type[SenseDecoder]:
        from lm_trainer.nn.senses import SenseDecoder

        return SenseDecoder

    def spec(self, vocab_size: int) -> DecoderSpec:
        # Sense vectors are larger than the queries and keys, which no other attention backend supports.
        scores = replace(self.resolved_score_spec(), backend="xla")
        size = self.hidden_dim // self.num_senses
        senses = SenseSpec(
            attention=AttentionSpec(self.num_senses, size, bias=self.use_bias, out_bias=False, scores=scores),
            mlp=self.mlp_spec(self.mlp_scale),
            out=self.mlp_spec(self.sense_intermediate_scale),
            norm=self.norm_spec(),
            dropout=self.resid_pdrop,
        )
        return replace(self.backbone_spec(vocab_size), senses=senses)
