"""Description of a decoder as plain values.

A model family is a function from its own settings to a `DecoderSpec`; everything else (modules, parameter and FLOP
counts, shardings, file formats) follows from the spec. Only add a field if it is orthogonal to the others and has a
value that means "absent".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

Activation = Literal["gelu", "gelu_new", "relu", "silu", "quick_gelu", "tanh"]
"""`gelu` is the exact form, `gelu_new` its tanh approximation, `quick_gelu` its sigmoid approximation."""

BlockInternal = Literal["attention", "mlp"]
"""Outputs of a block's two sublayers, before norm and residual connection."""


@dataclass(frozen=True)
class OffloadPolicy:
    """Rematerialisation that saves some values of a block in host memory, and recomputes all others."""

    host: tuple[BlockInternal | Literal["input"], ...]
    """Saved on the host; `input` is the block's input. Unnamed values are recomputed."""
    device: tuple[BlockInternal, ...] = ()
    """Saved on the device."""


Remat = Literal["none", "full", "dots", "dots_no_batch"] | tuple[BlockInternal, ...] | OffloadPolicy
"""Values of a block that the backward pass recomputes: none; everything; everything except the results of matrix
products; everything except the results of products with weights (attention scores are recomputed); everything except
the named results."""

Backend = Literal["xla", "cudnn", "splash", "ring", "auto"]
"""Implementation of attention; `auto` selects the fastest one that supports the spec. If devices share the positions of
a row, `ring` passes keys and values from one to the next, and the other backends gather them."""


@dataclass(frozen=True)
class NormSpec:
    """Normalization over the hidden dimension."""

    eps: float = 1e-5
    """Added to the variance or mean square."""
    bias: bool = True
    kind: Literal["layer", "rms"] = "layer"
    """`rms` divides by the root mean square (Zhang and Sennrich 2019) and subtracts no mean."""
    scale: bool = True
    """Multiplies by a learned gain."""
    unit_offset: bool = False
    """Multiplies by 1 + scale, initially 0, instead of by scale, initially 1."""


@dataclass(frozen=True)
class LinearScaling:
    """Divides every rope frequency: positions are interpolated (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True)
class WavelengthScaling:
    """Divides only the frequencies of long wavelengths, with a smooth transition (Grattafiori et al. 2024)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int
    """Wavelengths above this over `low_freq_factor` are divided, and below this over `high_freq_factor` unchanged."""


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): a ramp over the dimensions between unchanged and divided frequencies."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    magnitude: float
    """Multiplies both cosine and sine."""
    whole_dims: bool = True
    """Rounds the ends of the ramp outwards to whole dimensions."""


@dataclass(frozen=True)
class LongRopeScaling:
    """Divides the frequency of each pair of dimensions by its own factor (LongRoPE, Ding et al. 2024)."""

    factors: tuple[float, ...]
    magnitude: float
    """Multiplies both cosine and sine."""


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions (Su et al. 2021), with the halves of a head as the coordinates of its rotations."""

    theta: float = 10_000.0
    fraction: float = 1.0
    """Fraction of each head's dimensions, from the first, to rotate."""
    scaling: LinearScaling | WavelengthScaling | YarnScaling | LongRopeScaling | None = None


@dataclass(frozen=True)
class AlibiSpec:
    """Attention with linear biases (Press et al. 2022)."""

    max_bias: float = 8.0
    """The slopes of N heads are 2^(-max_bias i / N) for i from 1, N rounded up to a power of two."""


@dataclass(frozen=True)
class QkNormSpec:
    """Normalization of queries and keys before they are rotated."""

    norm: NormSpec
    over: Literal["head", "heads"] = "head"
    """Each head separately with one gain for all, or all heads together."""


@dataclass(frozen=True)
class ScoreSpec:
    """Attention scores, and their conversion to probabilities."""

    scale: float | None = None
    """Multiplies the scores; None: 1 / sqrt(head_dim)."""
    inverse_layer: bool = False
    """Divides the scores of layer i (from 0) by i + 1."""
    softcap: float | None = None
    """Bounds the scores c to softcap * tanh(c / softcap)."""
    dropout: float = 0.0
    """Dropout rate of the probabilities."""
    upcast: bool = False
    """Computes the scores in float32 for any compute dtype; the softmax is always float32."""
    backend: Backend = "xla"
    block_size: int | None = None
    """Number of queries whose scores are held at once, and recomputed in the backward pass; None: all, saved. For
    splash and ring, which save no scores, the size of their blocks; None: the largest suitable size."""


@dataclass(frozen=True)
class AttentionSpec:
    """Causal self-attention."""

    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None
    """Each key and value head serves num_heads / num_kv_heads query heads (Ainslie et al. 2023); None: one each."""
    bias: bool = True
    """Adds biases to queries, keys and values."""
    key_bias: bool = True
    """Adds the bias of keys as well, if `bias` is set. It changes no probability, since it adds the same constant to
    all scores of a query."""
    out_bias: bool = True
    positions: RopeSpec | AlibiSpec | None = None
    qk_norm: QkNormSpec | None = None
    clip: float | None = None
    """Bounds the elements of queries, keys and values."""
    window: int | None = None
    """Number of positions visible to a query, including its own; None: all previous ones."""
    scores: ScoreSpec = ScoreSpec()

    @property
    def kv_heads(self) -> int:
        """`num_kv_heads` with its default resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads


@dataclass(frozen=True)
class MlpSpec:
    """Two matrices with an activation between them."""

    hidden_dim: int
    activation: Activation = "gelu_new"
    bias: bool = True
    gated: bool = False
    """Adds a third matrix: the activation of its product multiplies the product of the first (Shazeer 2020)."""


@dataclass(frozen=True)
class MoeSpec:
    """Mixture of experts: gated MLPs without biases, a few of which are selected for each token by a router (Shazeer et
    al. 2017).
    """

    hidden_dim: int
    """Width of one expert."""
    num_experts: int
    top_k: int
    """Experts per token."""
    activation: Activation = "silu"
    renormalize: bool = True
    """Normalizes the weights of a token's experts to sum to 1."""
    balance_coef: float = 0.0
    """Coefficient of the load-balancing loss, a mean over layers."""
    z_coef: float = 0.0
    """Coefficient of the loss for large router logits, a mean over layers."""
    dense: bool | None = None
    """Computes every expert for every token instead of the selected ones; None: if it takes fewer operations."""


@dataclass(frozen=True)
class BlockSpec:
    """One layer: `x += post(f(pre(x)))`, with attention and then the MLP as f."""

    attention: AttentionSpec
    mlp: MlpSpec | MoeSpec
    pre_norm: NormSpec | None = None
    post_norm: NormSpec | None = None
    dropout: float = 0.0
    """Dropout rate for the result of each f, before it is added to the residual stream."""
    parallel: bool = False
    """Both f read the same x."""
    cross: AttentionSpec | None = None
    """Cross-attention to the output of an encoder: a third f, between the two, with the same norms and dropout. It has
    no mask."""

    @property
    def has_experts(self) -> bool:
        """True for a mixture of experts instead of the MLP."""
        return isinstance(self.mlp, MoeSpec)


@dataclass(frozen=True)
class EmbeddingSpec:
    """Operations between the token embeddings and the first layer, in the order of the fields."""

    scale: float | None = None
    """Multiplies the rows of the token table."""
    learned_positions: bool = False
    """Adds a table with a row for each position."""
    norm: NormSpec | None = None
    dropout: float = 0.0


@dataclass(frozen=True)
class HeadSpec:
    """The map from the last hidden state to logits."""

    tied: bool = True
    """Uses the matrix of the token embedding."""
    softcap: float | None = None
    """Bounds the logits l to softcap * tanh(l / softcap)."""


@dataclass(frozen=True)
class SenseSpec:
    """Sense vectors: several per token, independent of its context; the head reads their sum (Hewitt et al. 2023).

    The backbone only computes their weights.
    """

    attention: AttentionSpec
    """One head per sense: its probabilities are the weights. Values and output projection are absent."""
    mlp: MlpSpec
    """The residual layer first applied to token embeddings."""
    out: MlpSpec
    """Computes all senses of a token from the result of `mlp`."""
    norm: NormSpec
    """Normalizes the input and the inputs of both MLPs."""
    dropout: float = 0.0
    """Dropout rate for the terms of the residual layer."""


@dataclass(frozen=True)
class EncoderSpec:
    """An encoder of audio features: two convolutions of width 3 over time, each followed by an activation, the second
    with a stride of 2; sinusoidal positions; layers with unmasked attention (Radford et al. 2022, section 2.2).
    """

    num_features: int
    """Features of each frame of the input, such as channels of a log-mel spectrogram."""
    num_positions: int
    """Positions after the convolutions: half the frames of the input."""
    blocks: tuple[BlockSpec, ...]
    activation: Activation = "gelu"
    """Activation after the convolutions."""
    final_norm: NormSpec | None = None
    dropout: float = 0.0
    """Dropout rate after the positions are added."""


@dataclass(frozen=True)
class DecoderSpec:
    """An autoregressive transformer."""

    vocab_size: int
    hidden_dim: int
    num_positions: int
    """The longest sequence."""
    blocks: tuple[BlockSpec, ...]
    final_norm: NormSpec | None = None
    embedding: EmbeddingSpec = EmbeddingSpec()
    head: HeadSpec = HeadSpec()
    senses: SenseSpec | None = None
    """Computes the head's input from sense vectors; None: the last hidden state."""
    encoder: EncoderSpec | None = None
    """Computes the target of the layers' `cross`."""
    init_std: float = 0.02
    """Standard deviation of initial weights, except for weights that write to the residual stream."""
    scan: bool = False
    """Runs the repeats of the layer period as one loop: compiles fast, runs a little slower. Same parameters."""
    remat: Remat = "none"
    remat_groups: int = 0
    """Number of groups of loop iterations: only the input of each group is saved for the backward pass, which
    recomputes the input of each layer. 0: the input of each layer is saved."""

    @property
    def encoder_stack(self) -> DecoderSpec:
        """The layers of the encoder, executed and initialised like the decoder's."""
        assert self.encoder is not None
        return replace(self, blocks=self.encoder.blocks, num_positions=self.encoder.num_positions, encoder=None)

    @property
    def saves_inside_layers(self) -> bool:
        """True if `remat` saves values inside of a layer, on the device and separately for each layer."""
        return self.remat != "full" and not isinstance(self.remat, OffloadPolicy) and not self.remat_groups

    @property
    def residual_std(self) -> float:
        """Standard deviation of initial weights that write to the residual stream.

        Every layer adds to the stream twice, so 2L terms divided by sqrt(2L) give it the variance of a single term
        (Radford et al. 2019, section 2.3).
        """
        return self.init_std / math.sqrt(2 * len(self.blocks))

    @property
    def num_routers(self) -> int:
        """Number of layers with experts."""
        return sum(block.has_experts for block in self.blocks)

    @property
    def period(self) -> int:
        """Smallest p with blocks[i] == blocks[i % p] for every i.

        Parameters are stacked over the repeats of the period: layer i is row i // p of `blocks.<i % p>`.
        """
        n = len(self.blocks)
        return next(p for p in range(1, n + 1) if all(self.blocks[i] == self.blocks[i % p] for i in range(n)))

    def num_repeats(self, slot: int) -> int:
        """Number of layers at `slot` of the period; the last repeat of the period may be incomplete."""
        # Ceiling division: layers slot, slot + p, slot + 2p, ... below the number of layers.
        return -(-(len(self.blocks) - slot) // self.period)
