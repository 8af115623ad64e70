"""What a decoder is made of, as plain values.

A family of models is a function from its own settings to a `DecoderSpec`; everything else (modules, parameter and
FLOP counts, shardings, file formats) follows from the spec. A field enters only when it is orthogonal to the others
and has a value that means "absent".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["gelu", "gelu_new", "relu", "silu"]
"""`gelu` is the exact form, `gelu_new` its tanh approximation."""

Remat = Literal["none", "full", "dots", "dots_no_batch"]
"""What the backward pass recomputes inside a block: nothing; everything; all but the results of matrix products;
all but the results of those with weights (attention scores are recomputed)."""


@dataclass(frozen=True)
class NormSpec:
    """Layer normalization over the hidden dimension."""

    eps: float = 1e-5
    bias: bool = True


@dataclass(frozen=True)
class AttentionSpec:
    """Causal self-attention with one key and value head per query head."""

    num_heads: int
    head_dim: int
    bias: bool = True
    dropout: float = 0.0
    """Of the attention probabilities."""
    inverse_layer_scale: bool = False
    """Divides the scores of layer i (from 0) by i + 1."""
    upcast: bool = False
    """Computes the scores in float32 whatever the compute dtype; the softmax always is float32."""


@dataclass(frozen=True)
class MlpSpec:
    """Two matrices with an activation between them."""

    hidden_dim: int
    activation: Activation = "gelu_new"
    bias: bool = True


@dataclass(frozen=True)
class BlockSpec:
    """One layer: `x += post(f(pre(x)))`, with attention and then the MLP as f."""

    attention: AttentionSpec
    mlp: MlpSpec
    pre_norm: NormSpec | None = None
    post_norm: NormSpec | None = None
    dropout: float = 0.0
    """Of what each f adds to the residual stream."""


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer whose head is its token embedding."""

    vocab_size: int
    hidden_dim: int
    num_positions: int
    """Rows of the learned position table: the longest sequence."""
    blocks: tuple[BlockSpec, ...]
    final_norm: NormSpec | None = None
    embed_dropout: float = 0.0
    init_std: float = 0.02
    """Of every weight; those that write to the residual stream get it divided by sqrt(2 * layers)."""
    scan: bool = False
    """Runs the repeats of the layer period as one loop: compiles fast, runs a little slower. Same parameters."""
    remat: Remat = "none"

    @property
    def period(self) -> int:
        """The least p with blocks[i] == blocks[i % p] for every i.

        Parameters are stacked over the repeats of the period: layer i is row i // p of `blocks.<i % p>`.
        """
        n = len(self.blocks)
        return next(p for p in range(1, n + 1) if all(self.blocks[i] == self.blocks[i % p] for i in range(n)))

    def repeats(self, slot: int) -> int:
        """How many layers have the place `slot` of the period; the last repeat of the period may be cut short."""
        return -(-(len(self.blocks) - slot) // self.period)
