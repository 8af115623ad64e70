"""The functions of one microbatch that estimate curvature stage by stage, by a derivative of the gradient.

`lm_trainer.nn.curvature.hutchinson` in stages. With each value that goes from stage to stage goes its derivative in the
direction of the signs u: of the stream on its way forward, and of the loss's derivative for it on its way back. The
derivative of a stage's gradient is then that stage's part of H u.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32

from lm_trainer.core.batch import Batch
from lm_trainer.nn.curvature import derivative_along, sign_keys
from lm_trainer.nn.stages import Stream
from lm_trainer.step.loss.gradient import Sums
from lm_trainer.step.staged.split_loss import SplitLoss
from lm_trainer.step.staged.stage_functions import StageFunctions
from lm_trainer.step.state.model_def import Params


class StreamPair(NamedTuple):
    """A stream, or the loss's derivative for it, and the derivative of that along the signs."""

    value: Stream | None
    tangent: Stream | None


_NONE = StreamPair(None, None)


@dataclass(frozen=True)
class Hutchinson:
    """The stages of a loss with pairs in the place of streams and U * (H u) in that of gradients; no other sums."""

    loss: SplitLoss
    """Without what is logged, and with the key of the estimate."""

    def stages(self, batch: Batch) -> list[StageFunctions]:
        """As `SplitLoss.stages`. No values are handed on: the derivative of a gradient computes everything again."""
        return [self._of_stage(stage) for stage in self.loss.stages(batch)]

    def _of_stage(self, stage: StageFunctions) -> StageFunctions:
        def forward(
            params: Params, stream: StreamPair | None, batch: Batch, number: Any, step: jax.Array, index: jax.Array
        ) -> tuple[StreamPair, tuple[()]]:
            run: Any = stage.forward
            before, signs = stream or _NONE, self._signs(params, step, index, number)

            def function(params: Params, stream: Stream | None) -> Stream:
                return run(params, stream, batch, number, step, index)[0]

            return StreamPair(*_pushed_forward(function, (params, before.value), (signs, before.tangent))), ()

        def gradient(  # noqa: PLR0913 - as every gradient of a stage
            params: Params,
            stream: StreamPair | None,
            handed_on: Any,
            batch: Batch,
            number: Any,
            d_stream: StreamPair | None,
            step: jax.Array,
            index: jax.Array,
        ) -> tuple[StreamPair | None, Sums]:
            run: Any = stage.gradient
            before, after, signs = stream or _NONE, d_stream or _NONE, self._signs(params, step, index, number)

            def function(params: Params, stream: Stream | None, d_stream: Stream | None) -> tuple[Any, Params]:
                d_before, sums = run(params, stream, handed_on, batch, number, d_stream, step, index)
                return d_before, sums.tree

            primals, tangents = (params, before.value, after.value), (signs, before.tangent, after.tangent)
            found, along = derivative_along(function, primals, tangents)
            d_before = None if stream is None else StreamPair(found[0], along[0])
            return d_before, _times(signs, along[1])

        return replace(stage, forward=stage.forward and forward, gradient=gradient)

    def _signs(self, params: Params, step: jax.Array, index: jax.Array, number: jax.Array | None) -> Params:
        """The signs of parameters that a stage reads, of layer `number` those that `hutchinson` draws for it."""
        key = self.loss.key(step, index)
        assert key is not None
        shapes = self.loss.model.shapes
        keys = dict(zip(shapes, sign_keys(key, len(shapes)), strict=True))
        if number is None:
            return {name: jax.random.rademacher(keys[name], x.shape, x.dtype) for name, x in params.items()}
        row = number // self.loss.loss.period
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
