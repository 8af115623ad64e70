"""Description of a decoder as plain values.

A model family is a function from its own settings to a `DecoderSpec`. Everything else (modules, parameter and FLOP
counts, shardings, file formats) follows from the spec. Add a field only if it is orthogonal to the others and has a
value that means "absent".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from flax import nnx

    from lm_trainer.nn.mixer_spec import Mixer
    from lm_trainer.nn.multi_token_spec import MultiTokenSpec

from lm_trainer.nn.expert_spec import MoeSpec
from lm_trainer.nn.layer_sections import LayerSection, find_sections
from lm_trainer.nn.rope_spec import RopeSpec

Activation = Literal["gelu", "gelu_new", "relu", "silu", "quick_gelu", "tanh", "relu2"]
"""`gelu` is the exact form, `gelu_new` its tanh approximation, `quick_gelu` its sigmoid approximation; `relu2` is the
square of `relu` (So et al. 2021)."""

BlockInternal = Literal["attention", "mlp"]
"""Outputs of the two sublayers of a block, before the norm and the residual connection."""


@dataclass(frozen=True)
class OffloadPolicy:
    """Rematerialization that saves some values of a block in host memory and recomputes all others."""

    host: tuple[BlockInternal | Literal["input"], ...]
    """Values saved on the host; `input` is the input of the block. Values named in neither list are recomputed."""
    device: tuple[BlockInternal, ...] = ()
    """Values saved on the device."""


Remat = Literal["none", "full", "dots", "dots_no_batch"] | tuple[BlockInternal, ...] | OffloadPolicy
"""Values of a block that the backward pass recomputes: nothing; everything; everything except the results of matrix
products; everything except the results of products with weights (attention scores are recomputed); everything except
the named results."""

Backend = Literal["xla", "cudnn", "splash", "ring", "auto"]
"""Attention backend; `auto` selects the fastest one that supports the spec. If devices share the positions of a row,
`ring` passes keys and values from device to device, and the other backends gather them."""


PartFactory = Callable[..., "nnx.Module"]
"""A class that replaces a part of a layer: `module(spec, dim, init=init)` builds the part for a stream of width `dim`
(an `lm_trainer.nn.init.Initializer` makes its parameters)."""


@dataclass(frozen=True)
class NormSpec:
    """Normalization over the hidden dimension."""

    eps: float = 1e-5
    """Added to the variance or mean square."""
    bias: bool = True
    kind: Literal["layer", "rms"] = "layer"
    """`rms` divides by the root mean square and does not subtract the mean (Zhang and Sennrich 2019)."""
    scale: bool = True
    """Multiply the result by a learned gain."""
    unit_offset: bool = False
    """Multiply by 1 + scale, with scale initially 0, instead of by scale, initially 1."""
    factor: float | None = None
    """Constant that multiplies the result. In the final norm, it multiplies the logits."""


@dataclass(frozen=True)
class AlibiSpec:
    """Attention with linear biases (Press et al. 2022)."""

    max_bias: float = 8.0
    """The slopes of N heads are 2^(-max_bias i / N) for i = 1, 2, ..., with N rounded up to a power of two."""


@dataclass(frozen=True)
class QkNormSpec:
    """Normalization of queries and keys, applied before they are rotated."""

    norm: NormSpec
    over: Literal["head", "heads"] = "head"
    """Normalize each head separately, with one gain for all heads, or all heads together."""


@dataclass(frozen=True)
class PositionScaleSpec:
    """Factor of the scores of a query that grows with its position (Nakanishi 2025, arXiv 2501.19399):
    1 + rate log(1 + floor((position + 1) / interval)), with positions counted from 0.
    """

    interval: int
    """Number of positions with the same factor."""
    rate: float


@dataclass(frozen=True)
class ScoreSpec:
    """Computation of attention scores, and their conversion to probabilities."""

    scale: float | None = None
    """Factor that multiplies the scores; None: 1 / sqrt(head_dim)."""
    inverse_layer: bool = False
    """Divide the scores of layer i, counted from 0, by i + 1."""
    position_scale: PositionScaleSpec | None = None
    softcap: float | None = None
    """Bound each score c to softcap * tanh(c / softcap)."""
    dropout: float = 0.0
    """Dropout rate of the attention probabilities."""
    upcast: bool = False
    """Compute the scores in float32 for any compute dtype; the softmax is always float32."""
    max_documents: int | None = None
    """Maximum number of documents of a row, for kernels that take the mask as lengths of documents; None: unknown."""
    backend: Backend = "xla"
    block_size: int | None = None
    """Number of queries whose scores are held at once, and recomputed in the backward pass. None: the scores of all
    queries are held, and saved. For splash and ring, which save no scores: size of their blocks; None: the largest
    suitable size."""


@dataclass(frozen=True)
class KeySharingSpec:
    """Keys and values that several layers use (Brandon et al. 2024, arXiv 2405.12981)."""

    layer: int
    """Number of the layer that computes them. All layers that use them come after every layer that computes keys."""
    has_keys: bool
    """True: the layer computes its own keys and values, as `layer` does. False: it uses the ones of `layer`."""


@dataclass(frozen=True)
class AttentionSpec:
    """Causal self-attention."""

    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None
    """Number of key and value heads; each serves num_heads / num_kv_heads query heads (Ainslie et al. 2023). None:
    num_heads."""
    bias: bool = True
    """Add biases to queries, keys and values."""
    key_bias: bool = True
    """Also add the bias of keys if `bias` is set. It does not change the probabilities, because it adds the same
    constant to all scores of a query."""
    out_bias: bool = True
    positions: RopeSpec | AlibiSpec | None = None
    qk_norm: QkNormSpec | None = None
    clip: float | None = None
    """Bound of the absolute values of queries, keys and values, after their normalization."""
    window: int | None = None
    """Number of positions visible to a query, including its own; None: its own and all earlier positions."""
    chunk: int | None = None
    """Number of positions of a chunk. Documents are cut into chunks, and a query sees only its own chunk. None: one
    chunk."""
    scores: ScoreSpec = ScoreSpec()
    module: PartFactory | None = None
    """Class that computes this sublayer; None: `lm_trainer.nn.attention.Attention`, whose calls it must accept."""
    value_dim: int | None = None
    """Size of value vectors; None: head_dim."""
    gated: bool = False
    """Multiply the result of each head by the sigmoid of another linear map of the input."""
    values_are_keys: bool = False
    """Values are the results of the map of keys, without its norm and rotation; there is no map of values."""
    value_norm: NormSpec | None = None
    """Normalization of each head of values."""
    sharing: KeySharingSpec | None = None
    """Keys and values that several layers use; None: the layer computes its own, for itself alone."""
    sinks: bool = False
    """Add a learned logit per head to the scores of each query, like a key whose value is zero (Xiao et al. 2023,
    arXiv 2309.17453, section 3.3)."""

    @property
    def kv_heads(self) -> int:
        """`num_kv_heads` with its default resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def value_size(self) -> int:
        """`value_dim` with its default resolved."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def has_keys(self) -> bool:
        """True if the layer computes its own keys and values."""
        return self.sharing is None or self.sharing.has_keys


@dataclass(frozen=True)
class XieluSpec:
    """xIELU (Huang and Schlag 2024, arXiv 2411.13010): an activation with two learned scalars, the curvatures for
    positive and for negative inputs.
    """

    slope: float = 0.5
    """Slope at 0; also the lowest curvature for negative inputs."""
    curvature: float = 0.8
    """Initial value of both curvatures."""


@dataclass(frozen=True)
class MlpSpec:
    """Two matrices with an activation between them."""

    hidden_dim: int
    activation: Activation | XieluSpec = "gelu_new"
    bias: bool = True
    gated: bool = False
    """Add a third matrix: the activation of its product multiplies the product of the first matrix (Shazeer 2020)."""
    module: PartFactory | None = None
    """Class that computes this sublayer; None: `lm_trainer.nn.mlp.Mlp`, whose calls it must accept."""


@dataclass(frozen=True)
class LayerEmbeddingSpec:
    """A token embedding of the layer's own, which a gate adds to the stream (per-layer embeddings, Google 2025).

        x += norm(out(activation(gate(x)) * e)),    e = (n(project(x_0)) + sqrt(dim) table[token]) / sqrt(2)

    where x_0 is the stream before the first layer, and n the norm that the embeddings of all layers share.
    """

    vocab_size: int
    dim: int
    """Size of a vector of the table."""
    norm: NormSpec
    """Norm over the stream, and over the projection."""
    activation: Activation = "gelu_new"


@dataclass(frozen=True)
class BlockSpec:
    """One layer: `x += post(f(pre(x)))`, where f is first the mixer and then the MLP."""

    mixer: Mixer
    """The sublayer that combines positions, for example attention."""
    mlp: MlpSpec | MoeSpec | None
    """None: the mixer is the only sublayer."""
    pre_norm: NormSpec | None = None
    post_norm: NormSpec | None = None
    dropout: float = 0.0
    """Dropout rate of the result of each f, before it is added to the residual stream."""
    residual_scale: float | None = None
    """Factor of the result of each f, before it is added to the residual stream."""
    parallel: bool = False
    """The mixer and the MLP read the same x."""
    shared_norm: bool = False
    """The mixer and the MLP also read the same pre(x), so there is one norm instead of two. Only with `parallel`."""
    layer_embedding: LayerEmbeddingSpec | None = None
    """A last f, the token embedding of the layer's own."""
    output_scale: bool = False
    """Multiply the stream after the layer by a learned number, initially 1."""
    cross: AttentionSpec | None = None
    """Cross-attention to the output of an encoder: a third f, between the mixer and the MLP, with the same norms and
    dropout. It has no mask."""

    @property
    def attention(self) -> AttentionSpec:
        """The mixer of a layer whose mixer is known to be attention."""
        assert isinstance(self.mixer, AttentionSpec)
        return self.mixer

    @property
    def mlp_pre_norm(self) -> NormSpec | None:
        """The norm of the MLP's input; None if there is none, or only the mixer's, or if the MLP has norms inside."""
        normalizes_inside = isinstance(self.mlp, MoeSpec) and self.mlp.branch_norm is not None
        return None if self.mlp is None or self.shared_norm or normalizes_inside else self.pre_norm

    @property
    def has_experts(self) -> bool:
        """True if the layer has a mixture of experts instead of the MLP."""
        return isinstance(self.mlp, MoeSpec)


@dataclass(frozen=True)
class EmbeddingSpec:
    """Operations between the token embeddings and the first layer, in the order of the fields."""

    scale: float | None = None
    """Factor that multiplies the rows of the token table."""
    learned_positions: bool = False
    """Add a table with a row for each position."""
    norm: NormSpec | None = None
    dropout: float = 0.0


@dataclass(frozen=True)
class HeadSpec:
    """The map from the last hidden state to logits."""

    tied: bool = True
    """Use the matrix of the token embedding."""
    softcap: float | None = None
    """Bound each logit l to softcap * tanh(l / softcap)."""


@dataclass(frozen=True)
class SenseSpec:
    """Sense vectors: several vectors per token, independent of its context; the head reads a weighted sum of them
    (Hewitt et al. 2023).

    The layers only compute the weights of the sum.
    """

    attention: AttentionSpec
    """Attention with one head per sense; its probabilities are the weights. It has no values and no output
    projection."""
    mlp: MlpSpec
    """Residual layer that is applied to the token embeddings first."""
    out: MlpSpec
    """MLP that computes all senses of a token from the result of `mlp`."""
    norm: NormSpec
    """Norm of the input, and of the inputs of both MLPs."""
    dropout: float = 0.0
    """Dropout rate of the terms of the residual layer."""


@dataclass(frozen=True)
class EncoderSpec:
    """An encoder of audio features: two convolutions of width 3 over time, the second with a stride of 2, each followed
    by an activation; sinusoidal positions; layers with unmasked attention (Radford et al. 2022, section 2.2).
    """

    num_features: int
    """Number of features of each input frame, for example channels of a log-mel spectrogram."""
    num_positions: int
    """Number of positions after the convolutions: half the number of input frames."""
    blocks: tuple[BlockSpec, ...]
    activation: Activation = "gelu"
    """Activation after each convolution."""
    final_norm: NormSpec | None = None
    dropout: float = 0.0
    """Dropout rate after the addition of the positions."""


@dataclass(frozen=True)
class DecoderSpec:
    """An autoregressive transformer."""

    vocab_size: int
    hidden_dim: int
    num_positions: int
    """Maximum sequence length."""
    blocks: tuple[BlockSpec, ...]
    final_norm: NormSpec | None = None
    embedding: EmbeddingSpec = EmbeddingSpec()
    head: HeadSpec = HeadSpec()
    senses: SenseSpec | None = None
    """Computation of the head's input from sense vectors; None: the head reads the last hidden state."""
    multi_token: MultiTokenSpec | None = None
    """Modules after the layers that predict later tokens."""
    encoder: EncoderSpec | None = None
    """Encoder whose output is the memory of the layers' `cross`."""
    init_std: float = 0.02
    """Standard deviation of initial weights, except weights that write to the residual stream."""
    scan: bool = False
    """Run the repeats of the period of each section of layers as one loop, which compiles fast but runs slightly
    slower. Parameters are the same."""
    remat: Remat = "none"
    remat_groups: int = 0
    """Number of groups of loop iterations. Only the input of each group is saved for the backward pass, which
    recomputes the input of each layer. 0: the input of each layer is saved."""
    prefix: int = 0
    """Number of first layers that differ from the others, such as layers without experts. The other layers then repeat
    a period of their own, so that equal layers are stacked, and compiled once."""

    @property
    def all_blocks(self) -> tuple[BlockSpec, ...]:
        """The layers, and the layers of the modules that predict later tokens."""
        return (*self.blocks, *self.later_blocks)

    @property
    def later_blocks(self) -> tuple[BlockSpec, ...]:
        """The layers of the modules that predict later tokens."""
        return () if self.multi_token is None else (self.multi_token.block,) * self.multi_token.depth

    @property
    def encoder_stack(self) -> DecoderSpec:
        """The layers of the encoder, run and initialized like the layers of the decoder."""
        assert self.encoder is not None
        positions = self.encoder.num_positions
        return replace(
            self, blocks=self.encoder.blocks, prefix=0, num_positions=positions, encoder=None, multi_token=None
        )

    @property
    def saves_inside_layers(self) -> bool:
        """True if `remat` saves values inside layers, on the device and separately for each layer."""
        return self.remat != "full" and not isinstance(self.remat, OffloadPolicy) and not self.remat_groups

    @property
    def residual_std(self) -> float:
        """Standard deviation of initial weights that write to the residual stream.

        Every layer with an MLP adds to the stream twice. The sum of 2L terms, each divided by sqrt(2L), has the
        variance of a single term (Radford et al. 2019, section 2.3).
        """
        return self.init_std / math.sqrt(sum(1 + (block.mlp is not None) for block in self.blocks))

    @property
    def layer_embedding(self) -> LayerEmbeddingSpec | None:
        """The token embedding that each layer has of its own; None without one."""
        return self.blocks[0].layer_embedding if self.blocks else None

    @property
    def num_routers(self) -> int:
        """Number of layers with experts, including the modules that predict later tokens."""
        return sum(block.has_experts for block in self.all_blocks)

    @property
    def sections(self) -> tuple[LayerSection, ...]:
        """The layers of the prefix, if there is one, and the other layers."""
        return find_sections(self.blocks, self.prefix)

    @property
    def layers_by_slot(self) -> tuple[range, ...]:
        """Numbers of the layers at each slot of the sections.

        Parameters are stacked over the layers of a slot: arrays in `blocks.<slot>` have a row for each of its layers.
        """
        return tuple(layers for section in self.sections for layers in section.layers_by_slot)

    @property
    def layers_by_prefix(self) -> dict[str, range]:
        """Numbers of the layers at each slot, by the prefix of the names of its parameters; also of an encoder, and of
        the modules that predict later tokens, whose numbers follow the last layer's.
        """
        stacks = {"": self} if self.encoder is None else {"": self, "encoder.": self.encoder_stack}
        layers_by_prefix = {
            f"{module}blocks.{slot}.": layers
            for module, stack in stacks.items()
            for slot, layers in enumerate(stack.layers_by_slot)
        }
        if self.multi_token is not None:
            layers_by_prefix["multi_token.blocks.0."] = range(len(self.blocks), len(self.all_blocks))
        return layers_by_prefix
