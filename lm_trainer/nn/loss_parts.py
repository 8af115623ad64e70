"""The loss of a decoder in parts: what comes before its layers, each layer, and what comes after them.

A step that computes them apart holds the parameters of one part at a time.

Shape letters: B rows, S positions, D hidden dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lm_trainer.core.batch import Batch
from lm_trainer.nn.attention import make_context
from lm_trainer.nn.attention_dispatch import goes_round
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.loss import CROSS_ENTROPY, LossTerms, hidden_loss, hidden_nll
from lm_trainer.nn.moe import RouterStats, zero_router_stats
from lm_trainer.nn.ring_layout import from_zigzag, to_zigzag
from lm_trainer.nn.spec import DecoderSpec, Remat
from lm_trainer.nn.stack import run_layer


class Stream(NamedTuple):
    """The values that go from part to part."""

    x_BSD: jax.Array
    """The residual stream, in the compute dtype."""
    stats: RouterStats | None
    """Sums over the layers so far; None without routers."""
    logged: dict[str, jax.Array] = {}
    """Values that were logged so far: see `lm_trainer.step.logged_parts`."""


@dataclass(frozen=True)
class LossParts:
    """A loss in parts: `leave(layer(... layer(enter)))`, with the numbers of the loss as a whole.

    The functions take a module of which only the parameters that they read need be there, and a key for dropout, that
    of the microbatch; None switches dropout off.
    """

    num_layers: int
    period: int
    """Layers with the same `layer % period` have one program; their parameters are stacked as those of that block."""
    enter: Callable[[Any, Batch, jax.Array | None], Stream]
    """`enter(model, batch, key)`: the stream before the first layer."""
    layer: Callable[[Any, int, Stream, Batch, jax.Array, jax.Array | None], Stream]
    """`layer(model, place, stream, batch, layer, key)`: the stream after a layer, the only one that the model has at
    its place in the period; `layer` is its number, an int32 scalar."""
    leave: Callable[[Any, Stream, Batch, jax.Array | None], tuple[jax.Array, jax.Array, dict[str, jax.Array]]]
    """`leave(model, stream, batch, key)`: what the loss returns, from the stream after the last layer."""
    saving_layer: Callable[[Any, int, Stream, Batch, jax.Array, jax.Array | None], Stream] | None = None
    """As `layer`, for a derivative that computes only that again which the model says; None: it computes everything
    again."""


def hidden_after_layers(model: Decoder, stream: Stream, batch: Batch, key: jax.Array | None) -> jax.Array:
    """The hidden states that the head reads, [B, S, D]; arguments as for `LossParts.leave`."""
    tokens_BS, segments_BS = jnp.asarray(batch.tokens), jnp.asarray(batch.segments)
    return model.leave(stream.x_BSD, tokens_BS, segments_BS, key=model.part_keys(key).leave)


def token_loss_parts(
    spec: DecoderSpec,
    *,
    dtype: DTypeLike = jnp.float32,
    block_size: int | None = None,
    terms: LossTerms = CROSS_ENTROPY,
) -> LossParts:
    """`lm_trainer.nn.loss.token_loss` in parts, for decoders of `spec`; the other arguments as there."""
    return _decoder_parts(spec, dtype, partial(hidden_loss, block_size=block_size, terms=terms))


def token_nll_parts(
    spec: DecoderSpec, *, dtype: DTypeLike = jnp.float32, block_size: int | None = None, top: int = 0
) -> LossParts:
    """`lm_trainer.nn.loss.token_nll` in parts, for decoders of `spec`; the other arguments as there."""

    def head(model: Decoder, h_BSD: jax.Array, stats: RouterStats | None, batch: Batch) -> Any:
        del stats
        return hidden_nll(model, h_BSD, batch, block_size=block_size, top=top)

    return _decoder_parts(spec, dtype, head)


def _decoder_parts(spec: DecoderSpec, dtype: DTypeLike, head: Callable[..., Any]) -> LossParts:
    """A loss in parts: `head(model, hidden states, statistics of routers, batch)` of what comes after the layers."""

    def layout(batch: Batch) -> tuple[bool, Callable[[Any], jax.Array]]:
        """True where attention goes round a ring, and the way to its layout, in which the stream then is."""
        ring = goes_round(spec.blocks, dtype, batch.tokens.shape[1])
        return ring, (lambda x: to_zigzag(jnp.asarray(x))) if ring else jnp.asarray

    def enter(model: Decoder, batch: Batch, key: jax.Array | None) -> Stream:
        key = model.part_keys(key).enter
        _, laid = layout(batch)
        x_BSD = model.enter(laid(batch.tokens), laid(batch.positions), dtype=dtype, key=key)
        return Stream(x_BSD, zero_router_stats() if spec.num_routers else None)

    def layer_with(  # noqa: PLR0913 - as for `LossParts.layer`
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

    def leave(
        model: Decoder, stream: Stream, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        if layout(batch)[0]:
            stream = stream._replace(x_BSD=from_zigzag(stream.x_BSD))
        h_BSD = hidden_after_layers(model, stream, batch, key)
        return head(model, h_BSD, stream.stats, batch)

    saving = partial(layer_with, spec.remat) if spec.saves_inside_layers else None
    return LossParts(len(spec.blocks), spec.period, enter, partial(layer_with, "none"), leave, saving)
