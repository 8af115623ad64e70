"""Losses in stages: the embedding, each layer, and the head.

A step that computes them apart holds the parameters of one stage at a time.

Shape letters: B rows, S positions, D hidden dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lm_trainer.core.batch import Batch
from lm_trainer.core.tree import from_named_leaves, named_leaves
from lm_trainer.nn.attention import make_context
from lm_trainer.nn.attention_dispatch import uses_ring
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.loss import CROSS_ENTROPY, LossTerms, hidden_loss, hidden_nll
from lm_trainer.nn.moe import RouterStats, zero_router_stats
from lm_trainer.nn.ring_layout import from_zigzag, to_zigzag
from lm_trainer.nn.spec import DecoderSpec, Remat
from lm_trainer.nn.stack import run_layer


class Stream(NamedTuple):
    """The values that go from stage to stage."""

    x_BSD: Any
    """The residual stream, an array in the compute dtype; of a loss of one's own any tree of arrays."""
    stats: RouterStats | None = None
    """Sums over the layers so far; None without routers."""
    logged: dict[str, jax.Array] = {}
    """Values that were logged so far: see `lm_trainer.step.staged.logged_stages`."""


LossSums = tuple[jax.Array, jax.Array, dict[str, jax.Array]]
"""Sum of the weighted losses, sum of the weights, and sums of what else to report; float32 scalars."""


@dataclass(frozen=True)
class StagedLoss:
    """A loss in stages: `head(layer(... layer(embed)))`. Called as `loss(model, batch, key)`, it computes all of them.

    The functions take a module of which only the parameters that they read need be there, and a key for dropout, that
    of the microbatch; None switches dropout off. `trainer.gather: layer` computes them apart, and holds the parameters
    of one stage at a time.
    """

    num_layers: int
    layers: tuple[str, ...]
    """The beginning of the names of a layer's parameters, as `blocks.0.`; several where layers of several kinds take
    turns. The parameters have an axis in front, over the layers of that kind."""
    embed: Callable[[Any, Batch, jax.Array | None], Stream]
    """`embed(model, batch, key)`: the stream before the first layer."""
    layer: Callable[[Any, int, Stream, Batch, jax.Array, jax.Array | None], Stream]
    """`layer(model, place, stream, batch, number, key)`: the stream after a layer, the only one that the model has
    under `layers[place]`: its parameters there lack the axis over layers; `number` is an int32 scalar."""
    head: Callable[[Any, Stream, Batch, jax.Array | None], LossSums]
    """`head(model, stream, batch, key)`: what the loss returns, from the stream after the last layer."""
    saving_layer: Callable[[Any, int, Stream, Batch, jax.Array, jax.Array | None], Stream] | None = None
    """As `layer`, for a derivative that computes only that again which the model says; None: it computes everything
    again."""

    @property
    def period(self) -> int:
        """Layers with the same number modulo it are of one kind."""
        return len(self.layers)

    def __call__(self, model: nnx.Module, batch: Batch, key: jax.Array | None) -> LossSums:
        """The loss of a whole model; what it returns is as of `head`."""
        graphdef, state = nnx.split(model, nnx.Param)
        tree = nnx.to_pure_dict(state)
        stream = self.embed(model, batch, key)
        for number in range(self.num_layers):
            row, place = divmod(number, self.period)
            params = {n: x[row] if n.startswith(self.layers[place]) else x for n, x in named_leaves(tree).items()}
            own = nnx.merge(graphdef, from_named_leaves(tree, params))
            stream = self.layer(own, place, stream, batch, jnp.int32(number), key)
        return self.head(model, stream, batch, key)


def hidden_after_layers(model: Decoder, stream: Stream, batch: Batch, key: jax.Array | None) -> jax.Array:
    """The hidden states that the head reads, [B, S, D]; arguments as for `StagedLoss.head`."""
    tokens_BS, segments_BS = jnp.asarray(batch.tokens), jnp.asarray(batch.segments)
    return model.leave(stream.x_BSD, tokens_BS, segments_BS, key=model.part_keys(key).leave)


def staged_token_loss(
    spec: DecoderSpec,
    *,
    dtype: DTypeLike = jnp.float32,
    block_size: int | None = None,
    terms: LossTerms = CROSS_ENTROPY,
) -> StagedLoss:
    """`lm_trainer.nn.loss.token_loss` in stages, for decoders of `spec`; the other arguments as there."""
    return _decoder_stages(spec, dtype, partial(hidden_loss, block_size=block_size, terms=terms))


def staged_token_nll(
    spec: DecoderSpec, *, dtype: DTypeLike = jnp.float32, block_size: int | None = None, top: int = 0
) -> StagedLoss:
    """`lm_trainer.nn.loss.token_nll` in stages, for decoders of `spec`; the other arguments as there."""

    def head(model: Decoder, h_BSD: jax.Array, stats: RouterStats | None, batch: Batch) -> Any:
        del stats
        return hidden_nll(model, h_BSD, batch, block_size=block_size, top=top)

    return _decoder_stages(spec, dtype, head)


def _decoder_stages(spec: DecoderSpec, dtype: DTypeLike, head: Callable[..., Any]) -> StagedLoss:
    """A loss in stages: `head(model, hidden states, statistics of routers, batch)` of what comes after the layers."""

    def layout(batch: Batch) -> tuple[bool, Callable[[Any], jax.Array]]:
        """True where attention goes round a ring, and the way to its layout, in which the stream then is."""
        ring = uses_ring(spec.blocks, dtype, batch.tokens.shape[1])
        return ring, (lambda x: to_zigzag(jnp.asarray(x))) if ring else jnp.asarray

    def embed(model: Decoder, batch: Batch, key: jax.Array | None) -> Stream:
        key = model.part_keys(key).enter
        _, laid = layout(batch)
        x_BSD = model.enter(laid(batch.tokens), laid(batch.positions), dtype=dtype, key=key)
        return Stream(x_BSD, zero_router_stats() if spec.num_routers else None)

    def layer_with(  # noqa: PLR0913 - as for `StagedLoss.layer`
        remat: Remat,
        model: Decoder,
        place: int,
        stream: Stream,
        batch: Batch,
        layer: jax.Array,
        key: jax.Array | None,
    ) -> Stream:
        ring, laid = layout(batch)
        context = make_context(spec.blocks, laid(batch.positions), laid(batch.segments), ring=ring)
        block: Any = model.blocks[str(place)]
        key = model.part_keys(key).blocks
        return Stream(*run_layer(block, stream.x_BSD, stream.stats, context, layer, key=key, remat=remat))

    def last(model: Decoder, stream: Stream, batch: Batch, key: jax.Array | None) -> LossSums:
        if layout(batch)[0]:
            stream = stream._replace(x_BSD=from_zigzag(stream.x_BSD))
        h_BSD = hidden_after_layers(model, stream, batch, key)
        return head(model, h_BSD, stream.stats, batch)

    saving = partial(layer_with, spec.remat) if spec.saves_inside_layers else None
    layers = tuple(f"blocks.{place}." for place in range(spec.period))
    return StagedLoss(len(spec.blocks), layers, embed, partial(layer_with, "none"), last, saving)
