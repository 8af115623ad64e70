"""Description of a decoder as plain values.

A family of models is a function from its own settings to a `DecoderSpec`; everything else (modules, parameter and
FLOP counts, shardings, file formats) follows from the spec. A field enters only when it is orthogonal to the others
and has a value that means "absent".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

Activation = Literal["gelu", "gelu_new", "relu", "silu", "quick_gelu", "tanh"]
"""`gelu` is the exact form, `gelu_new` its tanh approximation, `quick_gelu` its sigmoid approximation."""

BlockInternal = Literal["attention", "mlp"]
"""The results of a block's two parts, before norm and residual connection."""


@dataclass(frozen=True)
class OffloadPolicy:
    """Rematerialisation that keeps some values of a block in the memory of the host, and computes the rest again."""

    host: tuple[BlockInternal | Literal["input"], ...]
    """Kept on the host; `input` is the block's. Everything that is not named is computed again."""
    device: tuple[BlockInternal, ...] = ()
    """Kept on the device."""


Remat = Literal["none", "full", "dots", "dots_no_batch"] | tuple[BlockInternal, ...] | OffloadPolicy
"""Rematerialisation of a block in the backward pass: nothing is computed again; everything; all but the results of
matrix products; all but the results of those with weights (attention scores are computed again); all but the named
results."""

Backend = Literal["xla", "cudnn", "splash", "ring", "auto"]
"""The implementation of attention; `auto` takes the fastest that can do what the spec says. Where devices share the
positions of a row, `ring` passes keys and values from one to the next, and the others gather them."""


@dataclass(frozen=True)
class NormSpec:
    """Normalization over the hidden dimension."""

    eps: float = 1e-5
    """Added to the variance or mean square."""
    bias: bool = True
    kind: Literal["layer", "rms"] = "layer"
    """`rms` divides by the root mean square (Zhang and Sennrich 2019) and subtracts no mean."""
    scale: bool = True
    """A gain to learn."""
    unit_offset: bool = False
    """Multiplies by 1 + scale, which starts at 0, instead of by scale, which starts at 1."""


@dataclass(frozen=True)
class LinearScaling:
    """Divides every rope frequency: positions are interpolated (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True)
class WavelengthScaling:
    """Divides the frequencies of long wavelengths alone, with a smooth step between (Grattafiori et al. 2024)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int
    """Wavelengths above this over `low_freq_factor` are divided, those below this over `high_freq_factor` kept."""


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): a ramp over the dimensions between kept and divided frequencies."""

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
    """Divides the frequency of each pair of dimensions by a factor of its own (LongRoPE, Ding et al. 2024)."""

    factors: tuple[float, ...]
    magnitude: float
    """Multiplies both cosine and sine."""


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions (Su et al. 2021), with the halves of a head as the coordinates of its rotations."""

    theta: float = 10_000.0
    fraction: float = 1.0
    """The share of each head's dimensions, from the first, that is rotated."""
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
    """Each head by itself with one gain for all, or all heads together."""


@dataclass(frozen=True)
class ScoreSpec:
    """Attention scores, and their way to probabilities."""

    scale: float | None = None
    """Multiplies the scores; None: 1 / sqrt(head_dim)."""
    inverse_layer: bool = False
    """Divides the scores of layer i (from 0) by i + 1."""
    softcap: float | None = None
    """Bounds the scores c to softcap * tanh(c / softcap)."""
    dropout: float = 0.0
    """Rate for the probabilities."""
    upcast: bool = False
    """Computes the scores in float32 whatever the compute dtype; the softmax always is float32."""
    backend: Backend = "xla"
    block_size: int | None = None
    """Queries whose scores are held at once, and computed again in the backward pass; None: all, kept. Of splash and
    ring, which keep none, the size of their blocks; None: the largest that suits."""


@dataclass(frozen=True)
class AttentionSpec:
    """Causal self-attention."""

    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None
    """Each key and value head serves num_heads / num_kv_heads query heads (Ainslie et al. 2023); None: one each."""
    bias: bool = True
    """Biases of queries, keys and values."""
    key_bias: bool = True
    """Gives keys a bias where queries and values have one. It changes no probability, since it adds the same to all
    scores of a query."""
    out_bias: bool = True
    positions: RopeSpec | AlibiSpec | None = None
    qk_norm: QkNormSpec | None = None
    clip: float | None = None
    """Bounds the elements of queries, keys and values."""
    window: int | None = None
    """Positions that a query sees, its own included; None: all before it."""
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
    """A third matrix: the activation of its product multiplies that of the first (Shazeer 2020)."""


@dataclass(frozen=True)
class MoeSpec:
    """Mixture of experts: gated MLPs without biases, a few of which a router chooses for each token (Shazeer et al.
    2017).
    """

    hidden_dim: int
    """Width of one expert."""
    num_experts: int
    top_k: int
    """Experts of each token."""
    activation: Activation = "silu"
    renormalize: bool = True
    """Makes the weights of a token's experts sum to 1."""
    balance_coef: float = 0.0
    """Coefficient of the loss for experts that do not share the tokens equally, a mean over layers."""
    z_coef: float = 0.0
    """Coefficient of the loss for large router logits, a mean over layers."""
    dense: bool | None = None
    """Computes every expert for every token instead of the chosen ones; None: where that takes fewer operations."""


@dataclass(frozen=True)
class BlockSpec:
    """One layer: `x += post(f(pre(x)))`, with attention and then the MLP as f."""

    attention: AttentionSpec
    mlp: MlpSpec | MoeSpec
    pre_norm: NormSpec | None = None
    post_norm: NormSpec | None = None
    dropout: float = 0.0
    """Rate for the result of each f, before it is added to the residual stream."""
    parallel: bool = False
    """Both f read the same x."""
    cross: AttentionSpec | None = None
    """Attention to what an encoder makes of its input: one more f, between the two, with norms and dropout as they
    have. It has no mask."""

    @property
    def has_experts(self) -> bool:
        """True for a mixture of experts in the place of the MLP."""
        return isinstance(self.mlp, MoeSpec)


@dataclass(frozen=True)
class EmbeddingSpec:
    """Token embeddings on their way to the first layer, in the order of the fields."""

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
    """The matrix is that of the token embedding."""
    softcap: float | None = None
    """Bounds the logits l to softcap * tanh(l / softcap)."""


@dataclass(frozen=True)
class SenseSpec:
    """Sense vectors: several for each token, independent of its neighbours, whose sum the head reads (Hewitt et al.
    2023).

    The backbone only gives the weight of each.
    """

    attention: AttentionSpec
    """A head for each sense: its probabilities are the weights. There are no values and no output."""
    mlp: MlpSpec
    """The residual layer that token embeddings go through first."""
    out: MlpSpec
    """Makes all senses of a token from the result of that layer."""
    norm: NormSpec
    """Normalizes the input and the inputs of both MLPs."""
    dropout: float = 0.0
    """Rate for the terms of the residual layer."""


@dataclass(frozen=True)
class EncoderSpec:
    """An encoder of features of audio: two convolutions of width 3 over time, each followed by an activation, the
    second with a stride of 2; sinusoidal positions; layers whose attention has no mask (Radford et al. 2022, section
    2.2).
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
    """Rate after the positions are added."""


@dataclass(frozen=True)
class DecoderSpec:
    """A transformer that writes token after token."""

    vocab_size: int
    hidden_dim: int
    num_positions: int
    """The longest sequence."""
    blocks: tuple[BlockSpec, ...]
    final_norm: NormSpec | None = None
    embedding: EmbeddingSpec = EmbeddingSpec()
    head: HeadSpec = HeadSpec()
    senses: SenseSpec | None = None
    """The source of the head's input; None: the last hidden state."""
    encoder: EncoderSpec | None = None
    """Makes what the layers' `cross` attends to."""
    init_std: float = 0.02
    """Standard deviation of every initial weight but those that write to the residual stream."""
    scan: bool = False
    """Runs the repeats of the layer period as one loop: compiles fast, runs a little slower. Same parameters."""
    remat: Remat = "none"
    remat_groups: int = 0
    """Number of groups that the iterations of the loop form: only the input of each group is kept for the backward
    pass, which computes the input of each layer again. 0: the input of each layer is kept."""

    @property
    def encoder_stack(self) -> DecoderSpec:
        """The layers of the encoder, executed and initialised as those of the decoder are."""
        assert self.encoder is not None
        return replace(self, blocks=self.encoder.blocks, num_positions=self.encoder.num_positions, encoder=None)

    @property
    def saves_inside_layers(self) -> bool:
        """True where `remat` keeps values of the inside of a layer, on the device and for each layer by itself."""
        return self.remat != "full" and not isinstance(self.remat, OffloadPolicy) and not self.remat_groups

    @property
    def residual_std(self) -> float:
        """Standard deviation of initial weights that write to the residual stream.

        Every layer adds to the stream twice, so 2L terms divided by sqrt(2L) leave its variance as it would be with
        one (Radford et al. 2019, section 2.3).
        """
        return self.init_std / math.sqrt(2 * len(self.blocks))

    @property
    def num_routers(self) -> int:
        """Layers that have experts."""
        return sum(block.has_experts for block in self.blocks)

    @property
    def period(self) -> int:
        """The least p with blocks[i] == blocks[i % p] for every i.

        Parameters are stacked over the repeats of the period: layer i is row i // p of `blocks.<i % p>`.
        """
        n = len(self.blocks)
        return next(p for p in range(1, n + 1) if all(self.blocks[i] == self.blocks[i % p] for i in range(n)))

    def repeats(self, slot: int) -> int:
        """Number of layers at the place `slot` of the period; the last repeat of the period may be cut short."""
        # Ceiling division: layers slot, slot + p, slot + 2p, ... below the number of layers.
        return -(-(len(self.blocks) - slot) // self.period)
