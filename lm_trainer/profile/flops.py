"""Floating point operations and parameters of a decoder, computed from its spec alone."""

from __future__ import annotations

from typing import NamedTuple

from lm_trainer.nn.spec import BlockSpec, DecoderSpec, NormSpec


class FlopsCount(NamedTuple):
    """Operations of one forward pass for one token, part by part; a multiply-add counts as two.

    This is the definition of model FLOPs that Levanter uses for MFU, so that figures can be compared: attention is
    counted as if every token saw the whole sequence (no saving for causality), norms, activations, embeddings and
    biases are left out, and recomputation (gradient checkpointing) never counts.
    """

    qkv: int
    """2 * hidden * (query + key + value heads) * head_dim, over all layers."""
    attention_out: int
    """2 * heads * head_dim * hidden, over all layers."""
    attention_product: int
    """Scores and weighted sum: 4 * seq_len * heads * head_dim, over all layers."""
    attention_softmax: int
    """Mask and softmax: 3 * seq_len * heads, over all layers."""
    mlp: int
    """2 * (number of matrices) * hidden * mlp width, over all layers."""
    head: int
    """2 * hidden * vocabulary."""

    @property
    def forward(self) -> int:
        """One forward pass, per token."""
        return sum(self)

    @property
    def forward_matmul(self) -> int:
        """The matrix products of one forward pass alone, per token."""
        return self.forward - self.attention_softmax

    @property
    def training(self) -> int:
        """Forward and backward, per token: three times the forward pass."""
        return 3 * self.forward


def flops_per_token(spec: DecoderSpec, seq_len: int) -> FlopsCount:
    """Operations per token when sequences of `seq_len` tokens are processed.

    MFU is `flops_per_token(...).training * tokens per second / peak operations per second of all devices`.
    """
    heads = [block.attention.num_heads for block in spec.blocks]
    widths = [block.attention.num_heads * block.attention.head_dim for block in spec.blocks]
    return FlopsCount(
        qkv=2 * spec.hidden_dim * 3 * sum(widths),
        attention_out=2 * spec.hidden_dim * sum(widths),
        attention_product=4 * seq_len * sum(widths),
        attention_softmax=3 * seq_len * sum(heads),
        mlp=2 * 2 * spec.hidden_dim * sum(block.mlp.hidden_dim for block in spec.blocks),
        head=2 * spec.hidden_dim * spec.vocab_size,
    )


def parameter_count(spec: DecoderSpec) -> int:
    """Trainable parameters; the head shares the token embedding, which counts once."""
    embeddings = (spec.vocab_size + spec.num_positions) * spec.hidden_dim
    blocks = sum(_block_parameters(block, spec.hidden_dim) for block in spec.blocks)
    return embeddings + blocks + _norm_parameters(spec.final_norm, spec.hidden_dim)


def _block_parameters(block: BlockSpec, hidden: int) -> int:
    width, inner = block.attention.num_heads * block.attention.head_dim, block.mlp.hidden_dim
    attention = 4 * hidden * width + (3 * width + hidden if block.attention.bias else 0)
    mlp = 2 * hidden * inner + (inner + hidden if block.mlp.bias else 0)
    norms = _norm_parameters(block.pre_norm, hidden) + _norm_parameters(block.post_norm, hidden)
    return attention + mlp + 2 * norms


def _norm_parameters(norm: NormSpec | None, hidden: int) -> int:
    return 0 if norm is None else hidden * (1 + norm.bias)
