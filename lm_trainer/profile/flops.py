"""Numbers of FLOPs and parameters of a decoder, computed from its spec."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from lm_trainer.nn.expert_spec import MoeSpec, SharedExpertSpec
from lm_trainer.nn.mixer_spec import softmax_specs
from lm_trainer.nn.own_part import count_part
from lm_trainer.nn.spec import (
    BlockSpec,
    DecoderSpec,
    LayerEmbeddingSpec,
    MlpSpec,
    OffloadPolicy,
    SenseSpec,
    XieluSpec,
)
from lm_trainer.profile.mixer_flops import count_mixer, norm_parameters


class FlopsCount(NamedTuple):
    """Number of FLOPs of one forward pass per token, by part; a multiply-add counts as two.

    This is the definition of model FLOPs for MFU that Levanter uses, so figures are comparable. Attention is counted as
    if every token attended to the full sequence (no reduction for causality); norms, activations, embeddings and biases
    are not counted, and neither is recomputation (gradient checkpointing).
    """

    qkv: int
    """2 * hidden * (query + key + value heads) * head_dim, over all layers. Mixers other than attention: their products
    of the input with weights. A layer whose attention is a class of the user counts 2 for each weight of a matrix here,
    and nothing in `attention_out`."""
    attention_out: int
    """2 * heads * head_dim * hidden, over all layers."""
    attention_product: int
    """Scores and weighted sum: 4 * seq_len * heads * head_dim, over all layers. Mixers other than attention: their
    products that combine positions."""
    attention_softmax: int
    """Mask and softmax: 3 * seq_len * heads, over all layers."""
    mlp: int
    """2 * (number of matrices) * hidden * mlp width, over all layers. With experts, counts the router and the experts
    that one token uses. Counts the three maps of the token embedding that a layer may have of its own, too."""
    head: int
    """2 * hidden * vocabulary, also for each module that predicts later tokens."""
    senses: int = 0
    """Products that compute the senses, the queries and keys of their weights, and the weighted sum."""
    cross: int = 0
    """Attention to an encoder, over all layers: queries, result, scores, weighted sum and softmax. Keys and values are
    computed once per row and divided among its tokens."""
    encoder: int = 0
    """The encoder of a row, divided among the tokens of the row."""
    joins: int = 0
    """The maps of both inputs of the modules that predict later tokens, whose layers count as all others."""

    @property
    def forward(self) -> int:
        """Number of FLOPs per token of one forward pass."""
        return sum(self)

    @property
    def forward_matmul(self) -> int:
        """Number of FLOPs per token of only the matrix products of one forward pass."""
        return self.forward - self.attention_softmax

    @property
    def training(self) -> int:
        """Number of FLOPs per token of the forward and backward passes: three times the forward pass."""
        # For each product, the backward pass computes two products: the gradients of its input and of its weight.
        return 3 * self.forward

    def training_with_adapters(self, adapters: int) -> int:
        """Returns the number of FLOPs per token of forward and backward passes if only adapters are trained.

        For a product with a frozen weight, only the gradient of the input is computed, so it costs twice its forward
        pass. Scores, softmax and adapters cost three times their forward pass.

        Args:
            adapters: number of FLOPs of a forward pass through all adapters: 2 per weight.
        """
        return 2 * self.forward + self.attention_product + self.attention_softmax + 3 * adapters


def flops_per_token(spec: DecoderSpec, seq_len: int) -> FlopsCount:
    """Returns the number of FLOPs per token for sequences of `seq_len` tokens.

    MFU is `flops_per_token(...).training * tokens per second / peak FLOP/s of all devices`.
    """
    mixers = [count_mixer(block.mixer, spec.hidden_dim, seq_len) for block in spec.all_blocks]
    weighing = 0 if spec.senses is None else 3 * seq_len * spec.senses.attention.num_heads
    return FlopsCount(
        qkv=sum(mixer.inputs for mixer in mixers),
        attention_out=sum(mixer.output for mixer in mixers),
        attention_product=sum(mixer.product for mixer in mixers),
        attention_softmax=sum(mixer.softmax for mixer in mixers) + weighing,
        mlp=sum(2 * _num_weights_after_mixer(block, spec.hidden_dim) for block in spec.all_blocks),
        head=2 * spec.hidden_dim * spec.vocab_size * (1 + len(spec.later_blocks)),
        senses=0 if spec.senses is None else _sense_flops(spec.senses, spec.hidden_dim, seq_len),
        cross=sum(_cross_attention_flops(block, spec, seq_len) for block in spec.blocks),
        encoder=_encoder_flops(spec) // seq_len,
        joins=2 * 2 * spec.hidden_dim * spec.hidden_dim * len(spec.later_blocks),
    )


def _num_weights_after_mixer(block: BlockSpec, hidden: int) -> int:
    embedding = 0 if block.layer_embedding is None else 3 * hidden * block.layer_embedding.dim
    return _num_active_weights(block.mlp, hidden) + embedding


def _cross_attention_flops(block: BlockSpec, spec: DecoderSpec, seq_len: int) -> int:
    if block.cross is None or spec.encoder is None:
        return 0
    length, width = spec.encoder.num_positions, block.cross.num_heads * block.cross.head_dim
    of_query = 4 * spec.hidden_dim * width + 4 * length * width + 3 * length * block.cross.num_heads
    return of_query + 4 * spec.hidden_dim * width * length // seq_len


def _encoder_flops(spec: DecoderSpec) -> int:
    """Returns the number of FLOPs of the encoder for one row."""
    if spec.encoder is None:
        return 0
    length, dim = spec.encoder.num_positions, spec.hidden_dim
    # The width is 3. The first convolution has one position per frame, twice as many as the second.
    convolutions = 2 * length * 2 * 3 * spec.encoder.num_features * dim + length * 2 * 3 * dim * dim
    layers = flops_per_token(spec.encoder_stack, length)._replace(head=0).forward
    return convolutions + length * layers


def ring_score_fraction(spec: DecoderSpec, seq_len: int, devices: int) -> float:
    """Returns the fraction of query-key pairs whose scores a ring of devices computes, averaged over heads and layers.

    With a causal mask, which hides whole blocks, it is about a half, and less with windows. `flops_per_token` counts
    all pairs.

    Args:
        spec: spec of a model whose attention supports a ring.
        seq_len: number of positions of a row.
        devices: number of devices that share the positions.
    """
    from lm_trainer.nn.ring_layout import RingLayout

    attentions = softmax_specs(spec.all_blocks)
    computed, heads = 0, sum(attention.num_heads for attention in attentions)
    for attention in attentions:
        layout = RingLayout.for_rows(attention, seq_len // devices, devices)
        blocks = sum(layout.num_computed_blocks(device) for device in range(devices))
        computed += attention.num_heads * blocks * layout.size**2
    return computed / (heads * seq_len**2)


def recomputed_flops_per_token(spec: DecoderSpec, seq_len: int, *, every_layer: bool = False) -> int:
    """Returns the number of FLOPs per token that rematerialisation adds to a training step, as in `FlopsCount`.

    With `every_layer`, each layer is fully recomputed once, regardless of the spec. A step that computes gradients
    layer by layer does this, because it cannot store activations as the spec requires.

    Hardware FLOPs utilisation (HFU) is MFU with these FLOPs added to the FLOPs of a training step (PaLM: Chowdhery et
    al. 2022, arXiv 2204.02311, appendix B). As is usual, a block without stored activations counts as a full forward
    pass, although the compiler omits products whose results no gradient needs. Recomputation inside an attention kernel
    is not counted.
    """
    # A step that gathers layer by layer computes the modules that predict later tokens together with the head.
    outside = _recomputed_encoder_flops(spec, seq_len)
    outside += sum(_recomputed_block_flops(block, spec, seq_len) for block in spec.later_blocks)
    if every_layer:
        return outside + sum(_count_block_flops(block, spec, seq_len).forward for block in spec.blocks)
    recomputed = outside + sum(_recomputed_block_flops(block, spec, seq_len) for block in spec.blocks)
    return recomputed + sum(_count_block_flops(block, spec, seq_len).forward for block in _grouped_blocks(spec))


def recomputed_product_flops(spec: DecoderSpec, *, every_layer: bool = False) -> int:
    """Returns the FLOPs per token of the products with weights that devices compute again for the backward pass.

    Compared with `recomputed_flops_per_token`, attention kernels are left out, and so is the last product of a layer:
    its result is the input of the next layer, which is saved, so compilers omit the product.
    """
    blocks = sum(_recomputed_products(block, spec, every_layer=every_layer) for block in spec.blocks)
    blocks += sum(_recomputed_products(block, spec, every_layer=False) for block in spec.later_blocks)
    return blocks if every_layer else blocks + sum(_count_products(block, spec) for block in _grouped_blocks(spec))


def _grouped_blocks(spec: DecoderSpec) -> list[BlockSpec]:
    """Returns the layers of the groups, each of which runs once more, to recompute the inputs of the layers."""
    if not spec.remat_groups:
        return []
    grouped = list[BlockSpec]()
    for layers, period, _ in spec.sections:
        iterations = len(layers) // period
        iterations -= iterations % spec.remat_groups
        grouped += [spec.blocks[layer] for layer in layers[: iterations * period]]
    return grouped


def _recomputed_products(block: BlockSpec, spec: DecoderSpec, *, every_layer: bool) -> int:
    remat = "full" if every_layer else spec.remat
    match remat:
        case "none":
            return 0
        case "dots" | "dots_no_batch":
            return _grouped_product_flops(block.mlp, spec.hidden_dim)
        case OffloadPolicy() as policy:
            saved = {*policy.host, *policy.device}
        case names:
            saved = set() if names == "full" else {*names}
    attention_out = _count_block_flops(block, spec, 1).attention_out if "attention" in saved else 0
    return _count_products(block, spec) - attention_out - 2 * _num_last_weights(block.mlp, spec.hidden_dim)


def _count_products(block: BlockSpec, spec: DecoderSpec) -> int:
    count = _count_block_flops(block, spec, 1)
    return count.qkv + count.attention_out + count.mlp + count.cross


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
    return flops_per_token(replace(spec, blocks=(block,), senses=None, multi_token=None), seq_len)._replace(
        head=0, encoder=0
    )


def _grouped_product_flops(mlp: MlpSpec | MoeSpec | None, hidden: int) -> int:
    """FLOPs of experts in grouped products, whose results JAX's remat policies for products do not store."""
    if not isinstance(mlp, MoeSpec) or mlp.kernel == "dense":
        return 0
    return 2 * mlp.top_k * 3 * hidden * mlp.hidden_dim


def _num_last_weights(mlp: MlpSpec | MoeSpec | None, hidden: int) -> int:
    if mlp is None:
        return 0
    if isinstance(mlp, MoeSpec):
        return hidden * (mlp.hidden_dim * mlp.top_k + (0 if mlp.shared is None else mlp.shared.hidden_dim))
    return hidden * mlp.hidden_dim


def _sense_flops(spec: SenseSpec, hidden: int, seq_len: int) -> int:
    # One multiply-add per weight: the MLP, its output for one vector and for each sense, the query and the key. In
    # addition, for each of seq_len positions: the scores, and the sum over all senses.
    count, width = spec.attention.num_heads, spec.attention.num_heads * spec.attention.head_dim
    weights = 2 * hidden * spec.mlp.hidden_dim + (1 + count) * hidden * spec.out.hidden_dim + 2 * hidden * width
    return 2 * weights + 2 * seq_len * (width + count * hidden)


def parameter_count(spec: DecoderSpec) -> int:
    """Returns the number of parameters; a head tied to the token embedding is not counted twice.

    Values that a router sets from the load of its experts are not counted, because no gradient trains them.
    """
    positions = spec.num_positions if spec.embedding.learned_positions else 0
    # Rows of size hidden_dim: token embedding, learned positions, and an untied head.
    rows = spec.vocab_size + positions + (0 if spec.head.tied else spec.vocab_size)
    blocks = sum(_block_parameters(block, spec.hidden_dim) for block in spec.blocks)
    norms = sum(norm_parameters(norm, spec.hidden_dim) for norm in (spec.embedding.norm, spec.final_norm))
    senses = 0 if spec.senses is None else _sense_parameters(spec.senses, spec.hidden_dim)
    if (layer := spec.layer_embedding) is not None:
        norms += norm_parameters(layer.norm, layer.dim)
    return rows * spec.hidden_dim + blocks + norms + senses + _encoder_parameters(spec) + _later_parameters(spec)


def embedding_parameter_count(spec: DecoderSpec) -> int:
    """Returns the number of parameters of token embeddings: of the model, and of layers that have one of their own."""
    layers = [block.layer_embedding for block in spec.blocks if block.layer_embedding is not None]
    return spec.vocab_size * spec.hidden_dim + sum(layer.vocab_size * layer.dim for layer in layers)


def active_parameter_count(spec: DecoderSpec) -> int:
    """Returns the number of parameters that a token uses: all of them but the experts that it did not choose."""
    mixtures = [block.mlp for block in spec.all_blocks if isinstance(block.mlp, MoeSpec)]
    unused = sum((mlp.num_experts - mlp.top_k) * _expert_parameters(mlp, spec.hidden_dim) for mlp in mixtures)
    return parameter_count(spec) - unused


def _later_parameters(spec: DecoderSpec) -> int:
    if spec.multi_token is None:
        return 0
    dim, modules = spec.hidden_dim, spec.multi_token
    of_module = _block_parameters(modules.block, dim) + 2 * dim * dim + 3 * norm_parameters(modules.norm, dim)
    return modules.depth * of_module


def _encoder_parameters(spec: DecoderSpec) -> int:
    if spec.encoder is None:
        return 0
    dim, encoder = spec.hidden_dim, spec.encoder
    convolutions = 3 * (encoder.num_features + dim) * dim + 2 * dim
    blocks = sum(_block_parameters(block, dim) for block in encoder.blocks)
    return convolutions + encoder.num_positions * dim + blocks + norm_parameters(encoder.final_norm, dim)


def _sense_parameters(spec: SenseSpec, hidden: int) -> int:
    width, sense_width = spec.attention.num_heads * spec.attention.head_dim, spec.attention.num_heads * hidden
    out = (hidden + sense_width) * spec.out.hidden_dim + (spec.out.hidden_dim + sense_width if spec.out.bias else 0)
    weighing = 2 * (hidden * width + (width if spec.attention.bias else 0))
    mlps = _mlp_parameters(spec.mlp, hidden) + out + _activation_parameters(spec.out)
    return mlps + weighing + 3 * norm_parameters(spec.norm, hidden)


def _block_parameters(block: BlockSpec, hidden: int) -> int:
    mixers = [block.mixer] if block.cross is None else [block.mixer, block.cross]
    parts = sum(count_mixer(mixer, hidden, 1).parameters for mixer in mixers)
    sublayers = len(mixers) + (block.mlp is not None)
    pre_norms = len(mixers) * norm_parameters(block.pre_norm, hidden) + norm_parameters(block.mlp_pre_norm, hidden)
    post_norms = sublayers * norm_parameters(block.post_norm, hidden)
    embedding = _layer_embedding_parameters(block.layer_embedding, hidden)
    return parts + _mlp_parameters(block.mlp, hidden) + embedding + pre_norms + post_norms + block.output_scale


def _layer_embedding_parameters(spec: LayerEmbeddingSpec | None, hidden: int) -> int:
    if spec is None:
        return 0
    return spec.dim * (spec.vocab_size + 3 * hidden) + norm_parameters(spec.norm, hidden)


def _mlp_parameters(spec: MlpSpec | MoeSpec | None, hidden: int) -> int:
    if spec is None:
        return 0
    if isinstance(spec, MoeSpec):
        # A column of the router for each expert.
        router = spec.num_experts * (hidden + spec.router.logit_bias + spec.router.expert_scale)
        experts = spec.num_experts * _expert_parameters(spec, hidden)
        return router + experts + _num_shared_weights(spec.shared, hidden) + _branch_norm_parameters(spec, hidden)
    if spec.module is not None:
        return count_part(spec, hidden).total
    # Up, down, and the optional gate.
    weights = (2 + spec.gated) * hidden * spec.hidden_dim
    biases = (1 + spec.gated) * spec.hidden_dim + hidden if spec.bias else 0
    return weights + biases + _activation_parameters(spec)


def _branch_norm_parameters(spec: MoeSpec, hidden: int) -> int:
    if spec.branch_norm is None:
        return 0
    return norm_parameters(spec.branch_norm.router, hidden) + 4 * norm_parameters(spec.branch_norm.experts, hidden)


def _expert_parameters(spec: MoeSpec, hidden: int) -> int:
    """Returns the number of parameters of one expert: three matrices and their biases."""
    return 3 * hidden * spec.hidden_dim + spec.bias * (2 * spec.hidden_dim + hidden)


def _activation_parameters(spec: MlpSpec) -> int:
    return 2 if isinstance(spec.activation, XieluSpec) else 0


def _num_active_weights(spec: MlpSpec | MoeSpec | None, hidden: int) -> int:
    """Returns the number of weights used per token; with experts, counts the router, the selected experts and the
    shared expert.
    """
    if isinstance(spec, MoeSpec):
        routed = spec.num_experts * hidden + spec.top_k * 3 * hidden * spec.hidden_dim
        return routed + _num_shared_weights(spec.shared, hidden)
    if spec is None:
        return 0
    if spec.module is not None:
        return count_part(spec, hidden).matrices
    return (2 + spec.gated) * hidden * spec.hidden_dim


def _num_shared_weights(spec: SharedExpertSpec | None, hidden: int) -> int:
    return 0 if spec is None else 3 * hidden * spec.hidden_dim + hidden * spec.gated
