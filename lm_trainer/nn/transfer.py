"""Constants in the forward pass of a model, relative to a smaller model whose hyperparameters it uses.

No model contains these constants: `lm_trainer.nn.folded_factors` finds the weights that take them up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lm_trainer.core.errors import UserError
from lm_trainer.nn.expert_spec import MoeSpec
from lm_trainer.nn.mixer_spec import DeltaSpec, Mixer, StateSpaceSpec, softmax_spec
from lm_trainer.nn.spec import AttentionSpec, BlockSpec, DecoderSpec, LayerEmbeddingSpec, NormSpec


@dataclass(frozen=True)
class ForwardFactors:
    """Factors that the forward pass of a model needs, in addition to the factors that its spec has."""

    depth: float
    """Number of layers over the number of layers of the base."""
    residual: float
    """Factor of the result of each sublayer."""
    embedding: float
    """Factor of the rows of the token table, where they enter the first layer."""
    head_input: float
    """Factor of the input of the head."""
    queries: Mapping[Mixer, float]
    """Factor of the queries of each kind of attention."""
    residual_std: float
    """Factor of the initial standard deviation of weights that write to the residual stream. Without it, they would
    have the standard deviation for the depth of the model, instead of the depth of the base."""


def forward_factors(spec: DecoderSpec, base: DecoderSpec, shallow_base: DecoderSpec) -> ForwardFactors:
    """Returns the factors with which a model behaves like its base, for any width and depth.

    With m_N the ratio of the widths, m_L of the depths, and d of the sizes of heads:

        result of each sublayer     1 / m_L                 Dey et al. 2025 (arXiv 2505.01618), table 1, alpha = 1
        attention scores            1 / d, not 1 / sqrt(d)  Yang et al. 2022 (arXiv 2203.03466), definition 4.1
        logits of a tied head       1 / m_N                 table 8 there; the weights of an untied head have it

    A constant in the spec that depends on the size, such as a factor sqrt(hidden_dim) of embeddings, keeps the value of
    the base.

    Args:
        spec: the model.
        base: the base with as many layers as the model.
        shallow_base: the base. It has another number of layers if hyperparameters are transferred over depth.

    Raises:
        UserError: if there is no rule for the model, or none of its weights can take up a factor.
    """
    _check_parts(spec, base)
    depth = len(spec.blocks) / len(shallow_base.blocks)
    residual = _residual_scale(shallow_base) / _residual_scale(spec) / depth
    embedding = (shallow_base.embedding.scale or 1.0) / (spec.embedding.scale or 1.0)
    head_input = _norm_factor(shallow_base.final_norm) / _norm_factor(spec.final_norm)
    if spec.head.tied:
        # The table is also the matrix of the head, which must not have the factor of the embedding.
        head_input *= base.hidden_dim / spec.hidden_dim / embedding
    queries: dict[Mixer, float] = {}
    for block, base_block in zip(spec.blocks, base.blocks, strict=True):
        queries |= _query_factor(block.mixer, base_block.mixer)
        if block.cross is not None and base_block.cross is not None:
            queries |= _query_factor(block.cross, base_block.cross)
    residual_std = shallow_base.residual_std / spec.residual_std
    factors = ForwardFactors(depth, residual, embedding, head_input, queries, residual_std)
    _check_gains(spec, factors)
    return factors


def _residual_scale(spec: DecoderSpec) -> float:
    scales = {block.residual_scale or 1.0 for block in spec.blocks}
    if len(scales) > 1:
        raise UserError("layers have different factors of their results, for which there is no rule")
    return scales.pop()


def _norm_factor(norm: NormSpec | None) -> float:
    return 1.0 if norm is None or norm.factor is None else norm.factor


def _query_factor(mixer: Mixer, base: Mixer) -> dict[Mixer, float]:
    attention, base_attention = softmax_spec(mixer), softmax_spec(base)
    if attention is None or base_attention is None:
        return {}
    return {
        mixer: _score_scale(base_attention) * base_attention.head_dim / attention.head_dim / _score_scale(attention)
    }


def _score_scale(spec: AttentionSpec) -> float:
    return spec.head_dim**-0.5 if spec.scores.scale is None else spec.scores.scale


def _check_parts(spec: DecoderSpec, base: DecoderSpec) -> None:
    """Raises `UserError` if the model has a part without a rule."""
    if spec.encoder is not None or spec.senses is not None:
        part = "an encoder" if spec.encoder is not None else "sense vectors"
        raise UserError(f"there is no published rule for a model with {part}; write type: standard")
    for block, base_block in zip(spec.blocks, base.blocks, strict=True):
        _check_experts(block, base_block)
        _check_states(block.mixer, base_block.mixer)
        _check_layer_embedding(block.layer_embedding, base_block.layer_embedding)
    if spec.init_std != base.init_std:
        raise UserError("base and model have different initial standard deviations; set the value of the base in model")


def _check_experts(block: BlockSpec, base: BlockSpec) -> None:
    if not isinstance(block.mlp, MoeSpec) or not isinstance(base.mlp, MoeSpec):
        return
    if (block.mlp.num_experts, block.mlp.top_k) != (base.mlp.num_experts, base.mlp.top_k):
        raise UserError(
            f"the base has {base.mlp.num_experts} experts, {base.mlp.top_k} for each token, and the model "
            f"{block.mlp.num_experts}, {block.mlp.top_k} for each token; the rules hold for equal numbers alone"
        )


def _check_states(mixer: Mixer, base: Mixer) -> None:
    """Raises `UserError` if recurrent layers differ in more than their width and number of heads."""
    match mixer, base:
        case StateSpaceSpec(), StateSpaceSpec():
            sizes = [(spec.head_dim, spec.state_dim) for spec in (mixer, base)]
        case DeltaSpec(), DeltaSpec():
            sizes = [(spec.key_dim, spec.value_dim) for spec in (mixer, base)]
        case _:
            return
    if sizes[0] != sizes[1]:
        raise UserError(
            "the states of the recurrent layers of base and model differ in size; there is no published rule for that, "
            "so widen the model by the number of heads"
        )


def _check_layer_embedding(spec: LayerEmbeddingSpec | None, base: LayerEmbeddingSpec | None) -> None:
    if spec is not None and base is not None and spec.dim != base.dim:
        raise UserError(
            f"each layer has a token embedding of its own, of size {base.dim} in the base and {spec.dim} in the model; "
            f"there is no published rule for that, so keep the size of the base"
        )


def _check_gains(spec: DecoderSpec, factors: ForwardFactors) -> None:
    """Raises `UserError` if a factor belongs to a norm without a gain."""
    if spec.head.tied and factors.head_input != 1.0 and not _has_gain(spec.final_norm):
        raise UserError(
            "the factor of the logits of a tied head belongs to the gain of the final norm, and this model has no such "
            "gain; untie the head"
        )
    for block in spec.blocks:
        if block.post_norm is not None and factors.residual != 1.0 and not _has_gain(block.post_norm):
            raise UserError(
                "the factor of the sublayers belongs to the gains of the norms after them, and this model has no such "
                "gains; write type: mup, which keeps the depth"
            )
        factor, attention = factors.queries.get(block.mixer, 1.0), block.mixer
        if factor == 1.0 or not isinstance(attention, AttentionSpec):
            continue
        if attention.clip is not None or (attention.qk_norm is not None and not _has_gain(attention.qk_norm.norm)):
            cause = "clipped" if attention.clip is not None else "normalized without a gain"
            raise UserError(
                f"queries are {cause}, so no weight can take up the factor of their scores; keep the size of the heads "
                f"of the base, and widen the model by the number of heads"
            )


def _has_gain(norm: NormSpec | None) -> bool:
    return norm is not None and norm.scale
