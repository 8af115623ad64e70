"""Numbers of FLOPs and parameters of sequence mixers."""

from __future__ import annotations

from typing import NamedTuple

from lm_trainer.nn.mixer_spec import DeltaSpec, LatentSpec, Mixer, StateSpaceSpec
from lm_trainer.nn.own_part import count_part
from lm_trainer.nn.spec import AttentionSpec, NormSpec


class MixerCount(NamedTuple):
    """FLOPs per token of one forward pass, and parameters; the parts are described in `FlopsCount`."""

    inputs: int
    """Products of the input with weights, before positions are combined."""
    output: int
    """Product of the result with the output matrix."""
    product: int
    """Products that combine positions."""
    softmax: int
    """Mask and softmax."""
    parameters: int


def count_mixer(spec: Mixer, hidden: int, seq_len: int) -> MixerCount:
    """Counts a mixer in a stream of `hidden` dimensions, for rows of `seq_len` positions."""
    match spec:
        case AttentionSpec():
            return _count_attention(spec, hidden, seq_len)
        case LatentSpec():
            return _count_latent(spec, hidden, seq_len)
        case StateSpaceSpec():
            return _count_state_space(spec, hidden, seq_len)
        case DeltaSpec():
            return _count_delta(spec, hidden, seq_len)


def _count_attention(spec: AttentionSpec, hidden: int, seq_len: int) -> MixerCount:
    heads, kv_heads = spec.num_heads, spec.kv_heads
    width, kv_width = heads * spec.head_dim, kv_heads * spec.head_dim
    if spec.module is not None:
        part = count_part(spec, hidden)
        return MixerCount(2 * part.matrices, 0, 4 * seq_len * width, 3 * seq_len * heads, part.total)
    value_width = heads * spec.value_size
    # Widths of the maps that a layer has itself.
    key_width = kv_width if spec.has_keys else 0
    kv_value_width = kv_heads * spec.value_size if spec.has_keys and not spec.values_are_keys else 0
    weights = hidden * (width * (1 + spec.gated) + key_width + kv_value_width)
    parameters = weights + hidden * value_width + spec.out_bias * hidden + spec.sinks * heads
    if spec.bias:
        parameters += width * (1 + spec.gated) + spec.key_bias * key_width + kv_value_width
    if spec.qk_norm is not None:
        sizes = (width, kv_width) if spec.qk_norm.over == "heads" else (spec.head_dim,) * 2
        parameters += sum(norm_parameters(spec.qk_norm.norm, size) for size in sizes[: 1 + spec.has_keys])
    if spec.has_keys:
        parameters += norm_parameters(spec.value_norm, spec.head_dim)
    return MixerCount(
        inputs=2 * weights,
        output=2 * hidden * value_width,
        product=2 * seq_len * (width + value_width),
        softmax=3 * seq_len * heads,
        parameters=parameters,
    )


def _count_latent(spec: LatentSpec, hidden: int, seq_len: int) -> MixerCount:
    width, value_width = spec.num_heads * spec.head_dim, spec.num_heads * spec.value_dim
    down = spec.latent_dim + spec.rotary_dim
    weights = hidden * down + spec.latent_dim * spec.num_heads * (spec.plain_dim + spec.value_dim)
    parameters = norm_parameters(spec.norm, spec.latent_dim) + spec.bias * (down + hidden)
    if spec.query_latent_dim is None:
        weights += hidden * width
    else:
        weights += spec.query_latent_dim * (hidden + width)
        parameters += norm_parameters(spec.norm, spec.query_latent_dim) + spec.bias * spec.query_latent_dim
    return MixerCount(
        inputs=2 * weights,
        output=2 * hidden * value_width,
        product=2 * seq_len * (width + value_width),
        softmax=3 * seq_len * spec.num_heads,
        parameters=parameters + weights + hidden * value_width,
    )


def _count_state_space(spec: StateSpaceSpec, hidden: int, seq_len: int) -> MixerCount:
    heads, groups, chunk = spec.num_heads, spec.num_groups, min(spec.chunk_size, seq_len)
    width, vector_width = heads * spec.head_dim, groups * spec.state_dim
    inputs, channels = 2 * width + 2 * vector_width + heads, width + 2 * vector_width
    # Pairs of positions of a chunk, and for the state of each head: reading from it and writing to it.
    product = 2 * chunk * (vector_width + width + heads) + 4 * width * spec.state_dim
    parameters = hidden * (inputs + width) + channels * (spec.conv_width + spec.conv_bias)
    parameters += norm_parameters(spec.norm, width) + 3 * heads + spec.bias * (inputs + hidden)
    return MixerCount(
        inputs=2 * hidden * inputs + 2 * spec.conv_width * channels,
        output=2 * hidden * width,
        product=product,
        softmax=3 * chunk * heads,
        parameters=parameters,
    )


def _count_delta(spec: DeltaSpec, hidden: int, seq_len: int) -> MixerCount:
    heads, chunk = spec.num_heads, min(spec.chunk_size, seq_len)
    key_width, width = spec.num_key_heads * spec.key_dim, heads * spec.value_dim
    inputs, channels = 2 * key_width + 2 * width + 2 * heads, 2 * key_width + width
    state = heads * spec.key_dim * spec.value_dim
    # Scores of queries and of keys, the solution of the triangular system and its inverse; the state is read twice.
    product = 2 * chunk * (2 * key_width + 2 * width + heads * (spec.key_dim + 1)) + 6 * state
    product += 2 * heads * (chunk * chunk - 1) // 3
    parameters = hidden * (inputs + width) + channels * spec.conv_width
    return MixerCount(
        inputs=2 * hidden * inputs + 2 * spec.conv_width * channels,
        output=2 * hidden * width,
        product=product,
        softmax=6 * chunk * heads,
        parameters=parameters + norm_parameters(spec.norm, spec.value_dim) + 2 * heads,
    )


def norm_parameters(norm: NormSpec | None, size: int) -> int:
    """Returns the number of parameters of a norm over `size` dimensions."""
    return 0 if norm is None else size * (norm.scale + norm.bias)
