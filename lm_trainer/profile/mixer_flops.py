"""Numbers of FLOPs and parameters of sequence mixers."""

from __future__ import annotations

from typing import NamedTuple

from lm_trainer.nn.mixer_spec import LatentSpec, Mixer
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


def _count_attention(spec: AttentionSpec, hidden: int, seq_len: int) -> MixerCount:
    heads, kv_heads = spec.num_heads, spec.kv_heads
    width, kv_width = heads * spec.head_dim, kv_heads * spec.head_dim
    value_width, kv_value_width = heads * spec.value_size, kv_heads * spec.value_size
    weights = hidden * (width + kv_width + kv_value_width)
    parameters = weights + hidden * value_width + spec.out_bias * hidden
    if spec.bias:
        parameters += width + spec.key_bias * kv_width + kv_value_width
    if spec.qk_norm is not None:
        sizes = (width, kv_width) if spec.qk_norm.over == "heads" else (spec.head_dim,) * 2
        parameters += sum(norm_parameters(spec.qk_norm.norm, size) for size in sizes)
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


def norm_parameters(norm: NormSpec | None, size: int) -> int:
    """Returns the number of parameters of a norm over `size` dimensions."""
    return 0 if norm is None else size * (norm.scale + norm.bias)
