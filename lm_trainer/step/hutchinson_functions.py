"""The functions of one microbatch that estimate curvature layer by layer, by a derivative of the gradient.

`lm_trainer.nn.curvature.hutchinson` in parts. Beside each value that goes from part to part goes its derivative in the
direction of the signs u: of the stream on its way forward, and of the loss's derivative for it on its way back. The
derivative of a part's gradient is then that part of H u.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32

from lm_trainer.core.batch import Batch
from lm_trainer.nn.curvature import derivative_along, sign_keys
from lm_trainer.nn.loss_parts import LossParts, Stream
from lm_trainer.step.gradient import Sums
from lm_trainer.step.model_def import ModelDef, Params
from lm_trainer.step.part_functions import PartFunctions, Reads


class StreamPair(NamedTuple):
    """A stream, or the loss's derivative for it, and the derivative of that along the signs."""

    value: Stream
    tangent: Stream


@dataclass(frozen=True)
class HutchinsonFunctions:
    """As `PartFunctions`, with pairs in the place of streams and U * (H u) in that of gradients; no other sums."""

    plain: PartFunctions
    """The parts of the loss, with the key of the estimate."""

    @property
    def model(self) -> ModelDef:
        """The model."""
        return self.plain.model

    @property
    def parts(self) -> LossParts:
        """The loss."""
        return self.plain.parts

    @property
    def trainable(self) -> Collection[str]:
        """The parameters that the estimate is of."""
        return self.plain.trainable

    def saving_layer(self, place: int) -> None:
        """None: the derivative of a gradient computes everything again."""

    def reads(self, shapes: Mapping[str, jax.ShapeDtypeStruct], batch: Batch) -> Reads:
        """As for `PartFunctions`."""
        return self.plain.reads(shapes, batch)

    def with_logged(self, *args: Any) -> HutchinsonFunctions:
        """Returns itself: nothing is logged of an estimate."""
        del args
        return self

    def enter(self, params: Params, batch: Batch, step: jax.Array, index: jax.Array) -> StreamPair:
        """The pair before the first layer."""

        def function(params: Params) -> Stream:
            return self.plain.enter(params, batch, step, index)

        return StreamPair(*_pushed_forward(function, (params,), (self._signs(params, step, index),)))

    def layer(self, place: int) -> Callable[..., StreamPair]:
        """As `PartFunctions.layer`."""
        plain = self.plain.layer(place)

        def layer(
            params: Params, stream: StreamPair, batch: Batch, number: jax.Array, step: jax.Array, index: jax.Array
        ) -> StreamPair:
            def function(params: Params, stream: Stream) -> Stream:
                return plain(params, stream, batch, number, step, index)

            signs = self._signs(params, step, index, number)
            return StreamPair(*_pushed_forward(function, (params, stream.value), (signs, stream.tangent)))

        return layer

    def leave_gradient(
        self, params: Params, stream: StreamPair, batch: Batch, step: jax.Array, index: jax.Array
    ) -> tuple[StreamPair, Sums]:
        """As `PartFunctions.leave_gradient`."""

        def gradient(params: Params, stream: Stream) -> tuple[Stream, Params]:
            d_stream, sums = self.plain.leave_gradient(params, stream, batch, step, index)
            return d_stream, sums.tree

        signs = self._signs(params, step, index)
        found, along = derivative_along(gradient, (params, stream.value), (signs, stream.tangent))
        return StreamPair(found[0], along[0]), _times(signs, along[1])

    def layer_gradient(self, place: int) -> Callable[..., tuple[StreamPair, Sums]]:
        """As `PartFunctions.layer_gradient`."""
        plain = self.plain.layer_gradient(place)

        def layer_gradient(  # noqa: PLR0913 - as in `PartFunctions`
            params: Params,
            stream: StreamPair,
            batch: Batch,
            number: jax.Array,
            d_stream: StreamPair,
            step: jax.Array,
            index: jax.Array,
        ) -> tuple[StreamPair, Sums]:
            def gradient(params: Params, stream: Stream, d_stream: Stream) -> tuple[Stream, Params]:
                before, sums = plain(params, stream, batch, number, d_stream, step, index)
                return before, sums.tree

            signs = self._signs(params, step, index, number)
            primals = (params, stream.value, d_stream.value)
            found, along = derivative_along(gradient, primals, (signs, stream.tangent, d_stream.tangent))
            return StreamPair(found[0], along[0]), _times(signs, along[1])

        return layer_gradient

    def enter_gradient(
        self, params: Params, batch: Batch, d_stream: StreamPair, step: jax.Array, index: jax.Array
    ) -> Sums:
        """As `PartFunctions.enter_gradient`."""

        def gradient(params: Params, d_stream: Stream) -> Params:
            return self.plain.enter_gradient(params, batch, d_stream, step, index).tree

        signs = self._signs(params, step, index)
        return _times(signs, derivative_along(gradient, (params, d_stream.value), (signs, d_stream.tangent))[1])

    def _signs(self, params: Params, step: jax.Array, index: jax.Array, number: jax.Array | None = None) -> Params:
        """The signs of parameters that a part reads, of layer `number` those that `hutchinson` draws for it."""
        key = self.plain.key(step, index)
        assert key is not None
        shapes = self.model.shapes
        keys = dict(zip(shapes, sign_keys(key, len(shapes)), strict=True))
        if number is None:
            return {name: jax.random.rademacher(keys[name], x.shape, x.dtype) for name, x in params.items()}
        row = number // self.parts.period
        return {name: signs_of_row(keys[name], shapes[name].shape, row, x.dtype) for name, x in params.items()}


def signs_of_row(key: jax.Array, shape: tuple[int, ...], row: jax.Array, dtype: Any) -> jax.Array:
    """`jax.random.rademacher(key, shape, dtype)[row]`, without drawing the others.

    JAX draws element i of an array from the i-th block of the cipher: see `jax_threefry_partitionable`.

    Args:
        key: of threefry.
        shape: with the axis over rows in front; a row has no more than 2^32 elements.
        row: an int32 scalar.
        dtype: of the signs.
    """
    size = math.prod(shape[1:])
    starts = np.arange(shape[0], dtype=np.uint64) * np.uint64(size)
    high, low = (jnp.asarray(half.astype(np.uint32))[row] for half in (starts >> np.uint64(32), starts))
    low_E = low[None] + jnp.arange(size, dtype=jnp.uint32)
    high_E = high[None] + (low_E < low[None]).astype(jnp.uint32)
    first_E, second_E = jnp.split(threefry_2x32(jax.random.key_data(key), jnp.concatenate([high_E, low_E])), 2)
    # A number below 1/2 of those that are uniform in [0, 1): its first bit is 0.
    negative_E = (first_E ^ second_E) >> 31
    return (1 - 2 * negative_E.astype(jnp.int32)).astype(dtype).reshape(shape[1:])


def _pushed_forward(function: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    """`jax.jvp`, also through functions that give a derivative of their own for the way back alone."""
    return derivative_along(lambda *args: jax.vjp(function, *args)[0], primals, tangents)


def _times(signs: Params, products: Params) -> Sums:
    # Gradients come with an axis in front.
    return Sums({}, {name: signs[name][None] * product for name, product in products.items()})
