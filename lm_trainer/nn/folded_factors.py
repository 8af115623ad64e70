"""Factors of the forward pass as factors of the weights that take them up.

The forward pass with a factor a of a weight W computes the same function as a forward pass with the weight a W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
from flax import nnx

from lm_trainer.nn.attention import Attention
from lm_trainer.nn.block import Block
from lm_trainer.nn.cross_attention import CrossAttention
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.init import WRITES_RESIDUAL
from lm_trainer.nn.latent_attention import LatentAttention
from lm_trainer.nn.linear import Linear
from lm_trainer.nn.norm import Norm
from lm_trainer.nn.transfer import ForwardFactors


@dataclass(frozen=True)
class FoldedFactor:
    """Factor of a parameter."""

    factor: float = 1.0
    offset: float = 0.0
    """Constant that the forward pass adds to the parameter: the factor applies to the sum."""
    writes_residual: bool = False
    """True for parameters of the last linear map of a sublayer."""

    def scale(self, x: jax.Array, initial: float) -> jax.Array:
        """Returns the initial value of the parameter, in the shape and dtype of `x`.

        Args:
            x: the value without factors.
            initial: factor of initial values alone.
        """
        factor = self.factor * initial
        return factor * x if self.offset == 0.0 else factor * (x + self.offset) - self.offset


def folded_factors(model: Decoder, factors: ForwardFactors) -> dict[str, FoldedFactor]:
    """Maps the dotted names of parameters to their factors. Parameters that take up no factor are left out.

    The factor of a sublayer belongs to its last linear map, or to the norm after it; the factor of queries to their
    linear map, or to the norm after it; the factor of the input of a head to the head, or to the final norm if the head
    is tied.
    """
    names = {id(variable): ".".join(map(str, path)) for path, variable in nnx.iter_graph(model)}
    residual = {id(variable) for variable in _residual_params(model)}
    folded = {
        names[id(variable)]: FoldedFactor(factor, offset, id(variable) in residual)
        for variable, factor, offset in _find_factors(model, factors)
    }
    # With a norm after the sublayer, the factor is the norm's.
    return {names[key]: FoldedFactor(writes_residual=True) for key in residual} | folded


_Found = tuple[nnx.Variable, float, float]


def _find_factors(model: Decoder, factors: ForwardFactors) -> Iterator[_Found]:
    yield model.embed.tokens, factors.embedding, 0.0
    if model.head is not None:
        yield model.head, factors.head_input, 0.0
    else:
        yield from _norm_params(model.final_norm, factors.head_input)
    for _, node in nnx.iter_graph(model):
        match node:
            case Block():
                yield from _sublayer_params(node.attention, node.attention_post_norm, factors.residual)
                yield from _sublayer_params(node.mlp, node.mlp_post_norm, factors.residual)
                yield from _sublayer_params(node.cross, node.cross_post_norm, factors.residual)
                if (embedding := node.layer_embedding) is not None:
                    yield from _sublayer_params(embedding, embedding.norm, factors.residual)
            case Attention() | CrossAttention():
                yield from _query_params(node, factors.queries.get(node.spec, 1.0))
            case LatentAttention():
                linear = node.q if node.spec.query_latent_dim is None else node.q_up
                yield from _linear_params(linear, factors.queries.get(node.spec, 1.0))


def _norm_params(norm: Callable[[jax.Array], jax.Array], factor: float) -> Iterator[_Found]:
    if isinstance(norm, Norm):
        if norm.scale is not None:
            yield norm.scale, factor, 1.0 if norm.spec.unit_offset else 0.0
        if norm.bias is not None:
            yield norm.bias, factor, 0.0


def _sublayer_params(sublayer: object, post_norm: Callable[[jax.Array], jax.Array], factor: float) -> Iterator[_Found]:
    if isinstance(post_norm, Norm):
        yield from _norm_params(post_norm, factor)
    elif isinstance(sublayer, nnx.Module):
        for variable in _residual_params(sublayer):
            yield variable, factor, 0.0


def _residual_params(module: nnx.Module) -> Iterator[nnx.Variable]:
    """Yields weights and biases of the last linear maps of sublayers."""
    for _, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Param) and variable.get_metadata().get(WRITES_RESIDUAL):
            yield variable


def _query_params(attention: Attention | CrossAttention, factor: float) -> Iterator[_Found]:
    if isinstance(attention, Attention) and attention.q_norm is not None:
        yield from _norm_params(attention.q_norm.norm, factor)
    else:
        yield from _linear_params(attention.q, factor)


def _linear_params(linear: Linear, factor: float) -> Iterator[_Found]:
    assert isinstance(linear.weight, nnx.Param)
    yield linear.weight, factor, 0.0
    if linear.bias is not None:
        yield linear.bias, factor, 0.0
