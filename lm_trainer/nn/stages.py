"""Staged losses: a loss as the stages embedding, layers and head, possibly after the stages of an encoder.

A step that computes the stages separately holds the parameters of only one stage at a time.

Shape letters: B rows, S positions, D hidden dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
from lm_trainer.nn.layer_sections import slot_of_each_layer
from lm_trainer.nn.layer_values import FirstValues, SharedKeys
from lm_trainer.nn.loss import CROSS_ENTROPY, LossTerms, hidden_nll, loss_after_layers
from lm_trainer.nn.ring_layout import from_zigzag, to_zigzag
from lm_trainer.nn.router import RouterStats, zero_router_stats
from lm_trainer.nn.spec import DecoderSpec
from lm_trainer.nn.stack import LayerRemat, run_layer


class Stream(NamedTuple):
    """Values that are passed from stage to stage."""

    x_BSD: Any
    """The residual stream, an array in the compute dtype, or `PassedValues`. In a custom loss, any tree of arrays."""
    stats: RouterStats | None = None
    """Sums of the router statistics of the layers so far; None without routers."""
    logged: dict[str, jax.Array] = {}
    """Values logged so far; see `lm_trainer.step.staged.logged_stages`."""
    memory: Any = None
    """Values that layers and head may read but do not change, such as the output of an encoder; see `MemoryStack`."""


class PassedValues(NamedTuple):
    """The residual stream of a decoder whose layers pass on other values too."""

    x_BSD: jax.Array
    first: FirstValues | None
    keys: SharedKeys | None


LossSums = tuple[jax.Array, jax.Array, dict[str, jax.Array]]
"""Sum of the weighted losses, sum of the weights, and sums of other reported values; all float32 scalars."""


@dataclass(frozen=True)
class LayerStack:
    """Layers that run one after another, and the stage before them.

    Each function takes a module, which must contain only the parameters that the function reads, and the microbatch's
    dropout key; None disables dropout.
    """

    num_layers: int
    layers: tuple[str, ...]
    """Name prefixes of the parameters of a layer, such as `blocks.0.`; several if there are several kinds of layers.
    The parameters have a leading axis over the layers of their kind."""
    embed: Callable[[Any, Batch, jax.Array | None], Stream]
    """`embed(model, batch, key)` returns the stream before the first layer."""
    layer: Callable[[Any, int, Stream, Batch, jax.Array, jax.Array | None], Stream]
    """`layer(model, slot, stream, batch, number, key)` returns the stream after a layer, the only one that the model
    contains under `layers[slot]`. Its parameters lack the axis over layers. `number`, an int32 scalar, is its index."""
    saving_layer: Callable[[Any, int, Stream, Batch, jax.Array, jax.Array | None], Stream] | None = field(
        default=None, kw_only=True
    )
    """Same as `layer`, but its derivative recomputes only the values that the model's `remat` selects; None:
    derivatives recompute everything."""
    numbers: tuple[range, ...] | None = field(default=None, kw_only=True)
    """Numbers of the layers of each kind; None: the kinds alternate."""

    @property
    def layers_by_kind(self) -> tuple[range, ...]:
        """`numbers` with its default resolved."""
        if self.numbers is not None:
            return self.numbers
        return tuple(range(kind, self.num_layers, len(self.layers)) for kind in range(len(self.layers)))

    def streams(self, model: nnx.Module, batch: Batch, key: jax.Array | None, memory: Any = None) -> Iterator[Stream]:
        """Yields the stream of a complete model after the embedding and after each layer; `memory` as in `Stream`."""
        graphdef, state = nnx.split(model, nnx.Param)
        tree = nnx.to_pure_dict(state)
        stream = self.embed(model, batch, key)._replace(memory=memory)
        yield stream
        for number, (slot, row) in enumerate(slot_of_each_layer(self.layers_by_kind)):
            params = {n: x[row] if n.startswith(self.layers[slot]) else x for n, x in named_leaves(tree).items()}
            layer_model = nnx.merge(graphdef, from_named_leaves(tree, params))
            stream = self.layer(layer_model, slot, stream, batch, jnp.int32(number), key)._replace(memory=memory)
            yield stream


@dataclass(frozen=True)
class MemoryStack(LayerStack):
    """Layers that run before the layers of a staged loss, such as an encoder or a frozen reference model."""

    finish: Callable[[Any, Stream, Batch, jax.Array | None], Any]
    """`finish(model, stream, batch, key)` returns the `memory` of later streams, from the stream after the last layer.
    It is computed in the stage of the loss's `embed`."""
    name: str = field(default="encoder", kw_only=True)
    """Name for use in plans."""


@dataclass(frozen=True)
class StagedLoss(LayerStack):
    """A loss in stages: `head(layer(... layer(embed)))`. A call `loss(model, batch, key)` computes all stages.

    `trainer.gather: layer` computes the stages separately, and so holds the parameters of only one stage at a time.
    """

    head: Callable[[Any, Stream, Batch, jax.Array | None], LossSums]
    """`head(model, stream, batch, key)` returns the results of the loss from the stream after the last layer."""
    memory: MemoryStack | None = field(default=None, kw_only=True)
    """Layers that run first, and whose result is the `memory` of all streams of the other layers and of the head."""

    @property
    def stacks(self) -> tuple[LayerStack, ...]:
        """All layers, in order of execution."""
        return (self,) if self.memory is None else (self.memory, self)

    def __call__(self, model: nnx.Module, batch: Batch, key: jax.Array | None) -> LossSums:
        """Computes the loss of a complete model. Returns the results of `head`."""
        *_, stream = self.streams(model, batch, key, self.compute_memory(model, batch, key))
        return self.head(model, stream, batch, key)

    def compute_memory(self, model: nnx.Module, batch: Batch, key: jax.Array | None) -> Any:
        """Computes the `memory` of all streams; None without layers that run first."""
        if self.memory is None:
            return None
        *_, stream = self.memory.streams(model, batch, key)
        return self.memory.finish(model, stream, batch, key)


def unpack_stream(stream: Stream) -> PassedValues:
    """Returns the residual stream of a decoder, and the values that its layers pass on."""
    return stream.x_BSD if isinstance(stream.x_BSD, PassedValues) else PassedValues(stream.x_BSD, None, None)


def hidden_after_layers(model: Decoder, stream: Stream, batch: Batch, key: jax.Array | None) -> jax.Array:
    """Computes the inputs of the head, [B, S, D]; arguments as for `StagedLoss.head`."""
    tokens_BS, segments_BS = jnp.asarray(batch.tokens), jnp.asarray(batch.segments)
    return model.head_input(unpack_stream(stream).x_BSD, tokens_BS, segments_BS, key=model.dropout_keys(key).head)


def staged_token_loss(
    spec: DecoderSpec,
    *,
    dtype: DTypeLike = jnp.float32,
    block_size: int | None = None,
    terms: LossTerms = CROSS_ENTROPY,
) -> StagedLoss:
    """Returns `lm_trainer.nn.loss.token_loss` in stages, for decoders of `spec`; the other arguments are the same."""

    def head(model: Decoder, h_BSD: jax.Array, stream: Stream, batch: Batch) -> LossSums:
        return loss_after_layers(model, h_BSD, stream.stats, batch, block_size=block_size, terms=terms)

    return decoder_stages(spec, dtype, head)


def staged_token_nll(
    spec: DecoderSpec, *, dtype: DTypeLike = jnp.float32, block_size: int | None = None, top: int = 0
) -> StagedLoss:
    """Returns `lm_trainer.nn.loss.token_nll` in stages, for decoders of `spec`; the other arguments are the same."""

    def head(model: Decoder, h_BSD: jax.Array, stream: Stream, batch: Batch) -> LossSums:
        del stream
        return hidden_nll(model, h_BSD, batch, block_size=block_size, top=top)

    return decoder_stages(spec, dtype, head)


HeadFn = Callable[[Decoder, jax.Array, Stream, Batch], Any]
"""`head(model, h_BSD, stream, batch)` returns the results of the last stage; `h_BSD` are the inputs of the head."""


def decoder_stages(spec: DecoderSpec, dtype: DTypeLike, head: HeadFn, memory: MemoryStack | None = None) -> StagedLoss:
    """Returns a loss for decoders of `spec` in stages.

    Args:
        spec: description of the decoder, possibly with an encoder.
        dtype: compute dtype.
        head: last stage.
        memory: layers that run first, if the decoder has no encoder.
    """

    def layout(batch: Batch) -> tuple[bool, Callable[[Any], jax.Array]]:
        """Returns true for ring attention, and a function that reorders rows into the layout of the stream."""
        ring = uses_ring(spec.blocks, dtype, batch.tokens.shape[1])
        return ring, (lambda x: to_zigzag(jnp.asarray(x))) if ring else jnp.asarray

    def pack(x_BSD: jax.Array, first: FirstValues | None, keys: SharedKeys | None) -> jax.Array | PassedValues:
        return x_BSD if first is None and keys is None else PassedValues(x_BSD, first, keys)

    def embed(model: Decoder, batch: Batch, key: jax.Array | None) -> Stream:
        key = model.dropout_keys(key).embed
        _, reorder = layout(batch)
        x_BSD = model.embed_input(reorder(batch.tokens), reorder(batch.positions), dtype=dtype, key=key)
        first = model.embed.first_values(x_BSD)
        keys = SharedKeys.empty(spec.blocks, x_BSD)
        return Stream(pack(x_BSD, first, keys), zero_router_stats() if spec.num_routers else None)

    def layer_with(  # noqa: PLR0913 - as for `StagedLoss.layer`
        remat: LayerRemat,
        model: Decoder,
        slot: int,
        stream: Stream,
        batch: Batch,
        layer: jax.Array,
        key: jax.Array | None,
    ) -> Stream:
        ring, reorder = layout(batch)
        context = make_context(spec.blocks, reorder(batch.positions), reorder(batch.segments), ring=ring)
        x_BSD, first, keys = unpack_stream(stream)
        context = context._replace(memory=stream.memory)
        if first is not None:
            context = context._replace(tokens_BS=reorder(batch.tokens), first=first)
        block: Any = model.blocks[str(slot)]
        key = model.dropout_keys(key).blocks
        x_BSD, keys, stats = run_layer(block, x_BSD, stream.stats, context, layer, key=key, keys=keys, remat=remat)
        return Stream(pack(x_BSD, first, keys), stats)

    def last(model: Decoder, stream: Stream, batch: Batch, key: jax.Array | None) -> LossSums:
        if layout(batch)[0]:
            stream = stream._replace(x_BSD=from_zigzag(unpack_stream(stream).x_BSD))
        h_BSD = hidden_after_layers(model, stream, batch, key)
        return head(model, h_BSD, stream, batch)

    saving = partial(layer_with, _remat_of_layer(spec)) if spec.saves_inside_layers else None
    layer, count, numbers = partial(layer_with, "none"), len(spec.blocks), spec.layers_by_slot
    layers = tuple(f"blocks.{slot}." for slot in range(len(numbers)))
    memory = memory if spec.encoder is None else _encoder_stages(spec.encoder_stack, dtype)
    return StagedLoss(count, layers, embed, layer, last, saving_layer=saving, numbers=numbers, memory=memory)


def _remat_of_layer(spec: DecoderSpec) -> LayerRemat:
    """`spec.remat` for a layer that has a program of its own.

    A program hands on whatever its derivative needs, which takes memory, so elementwise values are always recomputed.
    In one program for all layers, XLA decides what it keeps.
    """
    return "elementwise" if spec.remat == "none" else spec.remat


def _encoder_stages(stack: DecoderSpec, dtype: DTypeLike) -> MemoryStack:
    """Makes the stages of the encoder of an `EncoderDecoder`, whose layers `stack` describes."""

    def embed(model: Any, batch: Batch, key: jax.Array | None) -> Stream:
        return Stream(model.embed_features(batch, dtype=dtype, key=key))

    def layer_with(  # noqa: PLR0913 - as for `LayerStack.layer`
        remat: LayerRemat, model: Any, slot: int, stream: Stream, batch: Batch, layer: jax.Array, key: jax.Array | None
    ) -> Stream:
        del batch
        context = model.encoder.make_context(stream.x_BSD)
        block, key = model.encoder.blocks[str(slot)], model.encoder_keys(key).blocks
        x_BSD, _, _ = run_layer(block, stream.x_BSD, None, context, layer, key=key, remat=remat)
        return Stream(x_BSD)

    def finish(model: Any, stream: Stream, batch: Batch, key: jax.Array | None) -> jax.Array:
        del batch, key
        return model.encoder.final_norm(stream.x_BSD)

    saving = partial(layer_with, _remat_of_layer(stack)) if stack.saves_inside_layers else None
    layer, count, numbers = partial(layer_with, "none"), len(stack.blocks), stack.layers_by_slot
    layers = tuple(f"encoder.blocks.{slot}." for slot in range(len(numbers)))
    return MemoryStack(count, layers, embed, layer, finish, saving_layer=saving, numbers=numbers)


def frozen_stack(
    name: str, prefix: str, part: Callable[[Any], Decoder], spec: DecoderSpec, dtype: DTypeLike, head: HeadFn
) -> MemoryStack:
    """Returns the layers of a frozen decoder inside a model, without dropout.

    Args:
        name: as in `MemoryStack`.
        prefix: prefix of the names of the decoder's parameters in the model.
        part: returns the decoder of a model.
        spec: description of the decoder.
        dtype: compute dtype.
        head: returns the memory.
    """
    stages = decoder_stages(spec, dtype, head)

    def without_dropout(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda model, *args: function(part(model), *args[:-1], None)

    return MemoryStack(
        stages.num_layers,
        tuple(f"{prefix}{layers}" for layers in stages.layers),
        without_dropout(stages.embed),
        without_dropout(stages.layer),
        without_dropout(stages.head),
        numbers=stages.numbers,
        name=name,
    )
