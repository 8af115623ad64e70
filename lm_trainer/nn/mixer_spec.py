"""Descriptions of sequence mixers: the sublayer of a layer that combines positions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from lm_trainer.nn.spec import AttentionSpec, BlockSpec, NormSpec, RopeSpec, ScoreSpec


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1): keys and values of all heads are
    linear maps of one small vector per position, the latent. A cache stores only latents.

    A part of each query and of a key that all heads share is rotated; the remaining part of the key is computed from
    the latent and has no positions.
    """

    num_heads: int
    latent_dim: int
    """Size of the latent from which keys and values are computed."""
    plain_dim: int
    """Number of dimensions of a query and key without positions."""
    rotary_dim: int
    """Number of dimensions of a query and key that are rotated."""
    value_dim: int
    """Size of the value vectors of one head."""
    rope: RopeSpec
    norm: NormSpec
    """Norm of latents."""
    query_latent_dim: int | None = None
    """Size of a second latent, from which queries are computed; None: queries are computed from the input."""
    bias: bool = False
    """Add biases to the maps from the input to latents, and to the output."""
    scores: ScoreSpec = ScoreSpec()  # noqa: RUF009 - frozen

    @property
    def head_dim(self) -> int:
        """Size of the query and key vectors of one head."""
        return self.plain_dim + self.rotary_dim

    @property
    def expanded(self) -> AttentionSpec:
        """The attention that is computed from the queries, keys and values of all heads."""
        return AttentionSpec(
            self.num_heads, self.head_dim, bias=False, out_bias=self.bias, scores=self.scores, value_dim=self.value_dim
        )

    @property
    def absorbed(self) -> AttentionSpec:
        """The same attention with latents as the only keys and values, for decoding with a cache."""
        size, scale = self.latent_dim + self.rotary_dim, self.scores.scale
        # The default scale belongs to the size of the expanded queries and keys.
        scores = replace(self.scores, scale=self.head_dim**-0.5 if scale is None else scale)
        return AttentionSpec(self.num_heads, size, 1, bias=False, scores=scores, value_dim=self.latent_dim)


Mixer = AttentionSpec | LatentSpec
"""A sequence mixer."""


def softmax_spec(mixer: Mixer) -> AttentionSpec | None:
    """Returns the attention, with softmax of scores, that a mixer computes in training; None for other mixers."""
    match mixer:
        case AttentionSpec():
            return mixer
        case LatentSpec():
            return mixer.expanded
    return None


def softmax_specs(blocks: Iterable[BlockSpec]) -> list[AttentionSpec]:
    """Returns `softmax_spec` of each layer that has one."""
    specs = (softmax_spec(block.mixer) for block in blocks)
    return [spec for spec in specs if spec is not None]


def cache_sizes(mixer: Mixer) -> tuple[int, int, int] | None:
    """Returns the number of heads of the keys in a cache, their size, and the size of the values; None if the mixer
    needs no keys of earlier positions.
    """
    match mixer:
        case AttentionSpec():
            return mixer.kv_heads, mixer.head_dim, mixer.value_size
        case LatentSpec():
            # The rotated part of the key takes the place of keys, and the latent the place of values.
            return 1, mixer.rotary_dim, mixer.latent_dim
    return None
