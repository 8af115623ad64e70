"""FLOPs and parameter counts of a decoder, computed from its spec."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from lm_trainer.nn.spec import (
    AttentionSpec,
    BlockSpec,
    DecoderSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    OffloadPolicy,
    SenseSpec,
)


class FlopsCount(NamedTuple):
    """FLOPs of one forward pass per token, by part; a multiply-add counts as two.

    Levanter uses the same definition of model FLOPs for MFU, so figures are comparable: attention is counted as if
    every token attends to the full sequence (no saving for causality), norms, activations, embeddings and biases are
    omitted, and recomputation (gradient checkpointing) never counts.
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
    """2 * (number of matrices) * hidden * mlp width, over all layers; with experts, the experts used by a token, and
    the router."""
    head: int
    """2 * hidden * vocabulary."""
    senses: int = 0
    """Products that compute senses, the queries and keys of their weights, and the weighted sum."""
    cross: int = 0
    """Attention to an encoder, over all layers: queries, result, scores, weighted sum and softmax; keys and values,
    computed once per row, are divided among its tokens."""
    encoder: int = 0
    """The encoder of a row, divided among its tokens."""

    @property
    def forward(self) -> int:
        """FLOPs of one forward pass, per token."""
        return sum(self)

    @property
    def forward_matmul(self) -> int:
        """FLOPs of only the matrix products of one forward pass, per token."""
        return self.forward - self.attention_softmax

    @property
    def training(self) -> int:
        """FLOPs of forward and backward pass, per token: three times the forward pass."""
        # For each product, the backward pass computes two: the gradients of its input and of its weight.
        return 3 * self.forward

    def training_with_adapters(self, adapters: int) -> int:
        """FLOPs of forward and backward pass, per token, if all weights except adapters are frozen.

        A product with a frozen weight has only the gradient of its input, so it costs twice its forward pass; scores,
        softmax and adapters cost three times.

        Args:
            adapters: FLOPs of a forward pass through all adapters: 2 per weight.
        """
        return 2 * self.forward + self.attention_product + self.attention_softmax + 3 * adapters


def flops_per_token(spec: DecoderSpec, seq_len: int) -> FlopsCount:
    """FLOPs per token for sequences of `seq_len` tokens.

    MFU is `flops_per_token(...).training * tokens per second / peak FLOP/s of all devices`.
    """
    attentions = [block.attention for block in spec.blocks]
    weighing = [] if spec.senses is None else [spec.senses.attention]
    width = sum(a.num_heads * a.head_dim for a in attentions)
    kv_width = sum(a.kv_heads * a.head_dim for a in attentions)
    return FlopsCount(
        qkv=2 * spec.hidden_dim * (width + 2 * kv_width),
        attention_out=2 * spec.hidden_dim * width,
        attention_product=4 * seq_len * width,
        attention_softmax=3 * seq_len * sum(a.num_heads for a in attentions + weighing),
        mlp=sum(2 * _num_active_weights(block.mlp, spec.hidden_dim) for block in spec.blocks),
        head=2 * spec.hidden_dim * spec.vocab_size,
        senses=0 if spec.senses is None else _sense_flops(spec.senses, spec.hidden_dim, seq_len),
        cross=sum(_cross_attention_flops(block, spec, seq_len) for block in spec.blocks),
        encoder=_encoder_flops(spec) // seq_len,
    )


def _cross_attention_flops(block: BlockSpec, spec: DecoderSpec, seq_len: int) -> int:
    if block.cross is None or spec.encoder is None:
        return 0
    length, width = spec.encoder.num_positions, block.cross.num_heads * block.cross.head_dim
    of_query = 4 * spec.hidden_dim * width + 4 * length * width + 3 * length * block.cross.num_heads
    return of_query + 4 * spec.hidden_dim * width * length // seq_len


def _encoder_flops(spec: DecoderSpec) -> int:
    """FLOPs of the encoder for one row."""
    if spec.encoder is None:
        return 0
    length, dim = spec.encoder.num_positions, spec.hidden_dim
    # Width 3; the first convolution has one position per frame, twice as many as the second.
    convolutions = 2 * length * 2 * 3 * spec.encoder.num_features * dim + length * 2 * 3 * dim * dim
    layers = flops_per_token(spec.encoder_stack, length)._replace(head=0).forward
    return convolutions + length * layers


def ring_score_fraction(spec: DecoderSpec, seq_len: int, devices: int) -> float:
    """The fraction of query-key pairs whose scores a ring of devices computes, averaged over heads and layers.

    About half with a causal mask, which hides whole blocks; less with windows. `flops_per_token` counts all pairs.

    Args:
        spec: a model whose attention supports a ring.
        seq_len: number of positions of a row.
        devices: number of devices that share the positions.
    """
    from lm_trainer.nn.ring_layout import RingLayout

    computed, heads = 0, sum(block.attention.num_heads for block in spec.blocks)
    for block in spec.blocks:
        layout = RingLayout.for_rows(block.attention, seq_len // devices, devices)
        blocks = sum(layout.num_computed_blocks(device) for device in range(devices))
        computed += block.attention.num_heads * blocks * layout.size**2
    return computed / (heads * seq_len**2)


def recomputed_flops_per_token(spec: DecoderSpec, seq_len: int, *, every_layer: bool = False) -> int:
    """Additional FLOPs per token of rematerialisation in a training step, counted as in `FlopsCount`.

    With `every_layer`, each layer is fully recomputed once, regardless of the spec: a step that computes the gradient
    layer by layer does this, because it cannot store activations as the spec says.

    Hardware FLOPs utilisation (HFU) is MFU with these FLOPs added to a training step (PaLM: Chowdhery et al. 2022,
    arXiv 2204.02311, appendix B). As usual, a block without stored activations counts its full forward pass, although
    the compiler omits products whose results no gradient needs. Recomputation inside an attention kernel is not
    counted.
    """
    in_encoder = _recomputed_encoder_flops(spec, seq_len)
    if every_layer:
        return in_encoder + sum(_count_block_flops(block, spec, seq_len).forward for block in spec.blocks)
    recomputed = in_encoder + sum(_recomputed_block_flops(block, spec, seq_len) for block in spec.blocks)
    if not spec.remat_groups:
        return recomputed
    # Each layer of a group runs once more, to recompute the inputs of the layers.
    periods = len(spec.blocks) // spec.period
    grouped = periods // spec.remat_groups * spec.remat_groups * spec.period
    return recomputed + sum(_count_block_flops(block, spec, seq_len).forward for block in spec.blocks[:grouped])


def _recomputed_encoder_flops(spec: DecoderSpec, seq_len: int) -> int:
    if spec.encoder is None:
        return 0
    length = spec.encoder.num_positions
    return length * recomputed_flops_per_token(spec.encoder_stack, length) // seq_len


def _recomputed_block_flops(block: BlockSpec, spec: DecoderSpec, seq_len: int) -> int:
    count = _count_block_flops(block, spec, seq_len)
    match spec.remat:
        case "none":
            return 0
        case "full":
            return count.forward
        case "dots" | "dots_no_batch" as policy:
            scores = count.attention_product if policy == "dots_no_batch" else 0
            return scores + count.attention_softmax + _grouped_product_flops(block.mlp, spec.hidden_dim)
        case OffloadPolicy() as policy:
            named = {*policy.host, *policy.device}
        case named:
            pass
    # A saved array is the result of its sublayer's last product, so only that product is not recomputed.
    crossing = 0 if block.cross is None else 2 * spec.hidden_dim * block.cross.num_heads * block.cross.head_dim
    last = {"attention": count.attention_out + crossing, "mlp": 2 * _num_last_weights(block.mlp, spec.hidden_dim)}
    return count.forward - sum(last.get(name, 0) for name in named)


def _count_block_flops(block: BlockSpec, spec: DecoderSpec, seq_len: int) -> FlopsCount:
    return flops_per_token(replace(spec, blocks=(block,), senses=None), seq_len)._replace(head=0, encoder=0)


def _grouped_product_flops(mlp: MlpSpec | MoeSpec, hidden: int) -> int:
    """FLOPs of experts in grouped products, whose results JAX's remat policies for products do not store."""
    return 2 * mlp.top_k * 3 * hidden * mlp.hidden_dim if isinstance(mlp, MoeSpec) and not mlp.dense else 0


def _num_last_weights(mlp: MlpSpec | MoeSpec, hidden: int) -> int:
    return hidden * mlp.hidden_dim * (mlp.top_k if isinstance(mlp, MoeSpec) else 1)


def _sense_flops(spec: SenseSpec, hidden: int, seq_len: int) -> int:
    # One multiply-add per weight: the MLP, its output for one vector and for every sense, query and key. Then, for each
    # of seq_len positions: the scores, and the sum over all senses.
    count, width = spec.attention.num_heads, spec.attention.num_heads * spec.attention.head_dim
    weights = 2 * hidden * spec.mlp.hidden_dim + (1 + count) * hidden * spec.out.hidden_dim + 2 * hidden * width
    return 2 * weights + 2 * seq_len * (width + count * hidden)


def parameter_count(spec: DecoderSpec) -> int:
    """Number of parameters; a head tied to the token embedding counts once."""
    positions = spec.num_positions if spec.embedding.learned_positions else 0
    # Rows of hidden_dim: token embedding, learned positions, and an untied head.
    rows = spec.vocab_size + positions + (0 if spec.head.tied else spec.vocab_size)
    blocks = sum(_block_parameters(block, spec.hidden_dim) for block in spec.blocks)
    norms = sum(_norm_parameters(norm, spec.hidden_dim) for norm in (spec.embedding.norm, spec.final_norm))
    senses = 0 if spec.senses is None else _sense_parameters(spec.senses, spec.hidden_dim)
    return rows * spec.hidden_dim + blocks + norms + senses + _encoder_parameters(spec)


def _encoder_parameters(spec: DecoderSpec) -> int:
    if spec.encoder is None:
        return 0
    dim, encoder = spec.hidden_dim, spec.encoder
    convolutions = 3 * (encoder.num_features + dim) * dim + 2 * dim
    blocks = sum(_block_parameters(block, dim) for block in encoder.blocks)
    return convolutions + encoder.num_positions * dim + blocks + _norm_parameters(encoder.final_norm, dim)


def _sense_parameters(spec: SenseSpec, hidden: int) -> int:
    width, sense_width = spec.attention.num_heads * spec.attention.head_dim, spec.attention.num_heads * hidden
    out = (hidden + sense_width) * spec.out.hidden_dim + (spec.out.hidden_dim + sense_width if spec.out.bias else 0)
    weighing = 2 * (hidden * width + (width if spec.attention.bias else 0))
    return _mlp_parameters(spec.mlp, hidden) + out + weighing + 3 * _norm_parameters(spec.norm, hidden)


def _block_parameters(block: BlockSpec, hidden: int) -> int:
    norms = _norm_parameters(block.pre_norm, hidden) + _norm_parameters(block.post_norm, hidden)
    attentions = [block.attention] if block.cross is None else [block.attention, block.cross]
    parts = sum(_attention_parameters(attention, hidden) for attention in attentions)
    return parts + _mlp_parameters(block.mlp, hidden) + (1 + len(attentions)) * norms


def _attention_parameters(spec: AttentionSpec, hidden: int) -> int:
    width, kv_width = spec.num_heads * spec.head_dim, spec.kv_heads * spec.head_dim
    # Query and output are hidden x width, key and value hidden x kv_width.
    total = 2 * hidden * (width + kv_width)
    if spec.bias:
        total += width + (1 + spec.key_bias) * kv_width
    if spec.out_bias:
        total += hidden
    if spec.qk_norm is not None:
        sizes = (width, kv_width) if spec.qk_norm.over == "heads" else (spec.head_dim,) * 2
        total += sum(_norm_parameters(spec.qk_norm.norm, size) for size in sizes)
    return total


def _mlp_parameters(spec: MlpSpec | MoeSpec, hidden: int) -> int:
    if isinstance(spec, MoeSpec):
        # A row of the router and the three matrices of each expert.
        return spec.num_experts * (hidden + 3 * hidden * spec.hidden_dim)
    # Up, down, and the optional gate.
    weights = (2 + spec.gated) * hidden * spec.hidden_dim
    return weights + ((1 + spec.gated) * spec.hidden_dim + hidden if spec.bias else 0)


def _num_active_weights(spec: MlpSpec | MoeSpec, hidden: int) -> int:
    """Number of weights used per token: of experts, the selected ones and the router."""
    if isinstance(spec, MoeSpec):
        return spec.num_experts * hidden + spec.top_k * 3 * hidden * spec.hidden_dim
    return (2 + spec.gated) * hidden * spec.hidden_dim


def _norm_parameters(norm: NormSpec | None, size: int) -> int:
    return 0 if norm is None else size * (norm.scale + norm.bias)
