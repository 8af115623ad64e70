"""Functions of one microbatch that estimate curvature stage by stage, as a derivative of the gradient.

This is `lm_trainer.nn.curvature.hutchinson` in stages. Each value passed between stages is paired with its derivative
in the direction of the random signs u: the stream in the forward pass, and the derivative of the loss with respect to
the stream in the backward pass. The directional derivative of the gradient of a stage is then this stage's part of H u.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32

from lm_trainer.core.batch import Batch
from lm_trainer.core.jax_types import PyTree
from lm_trainer.nn.curvature import jvp_of_gradient, sign_keys
from lm_trainer.nn.stages import Stream
from lm_trainer.step.loss.gradient import Sums
from lm_trainer.step.staged.split_loss import SplitLoss
from lm_trainer.step.staged.stage_functions import StageFunctions
from lm_trainer.step.state.model_def import Params

if TYPE_CHECKING:
    from jax.typing import DTypeLike


class StreamPair(NamedTuple):
    """A stream (or the derivative of the loss with respect to it) and its derivative in the direction of the signs."""

    value: Stream | None
    tangent: Stream | None


_NONE = StreamPair(None, None)


@dataclass(frozen=True)
class Hutchinson:
    """Stages of a loss with pairs instead of streams, u * (H u) instead of gradients, and no other sums."""

    loss: SplitLoss
    """The loss in stages, without logged values and with the random key of the estimate."""

    def stages(self, batch: Batch) -> list[StageFunctions]:
        """Same as `SplitLoss.stages`. Saves no residuals: the derivative of a gradient recomputes everything."""
        return [self._differentiate_stage(stage) for stage in self.loss.stages(batch)]

    def _differentiate_stage(self, stage: StageFunctions) -> StageFunctions:
        def forward(
            params: Params,
            stream: StreamPair | None,
            batch: Batch,
            number: jax.Array | None,
            step: jax.Array,
            index: jax.Array,
        ) -> tuple[StreamPair, tuple[()]]:
            run = stage.forward
            assert run is not None
            pair, signs = stream or _NONE, self._draw_signs(stage, params, step, index, number)

            def function(params: Params, stream: Stream | None) -> Stream:
                return run(params, stream, batch, number, step, index)[0]

            return StreamPair(*_jvp(function, (params, pair.value), (signs, pair.tangent))), ()

        def gradient(  # noqa: PLR0913 - the signature of every stage gradient
            params: Params,
            stream: StreamPair | None,
            handed_on: PyTree,
            batch: Batch,
            number: jax.Array | None,
            d_stream: StreamPair | None,
            step: jax.Array,
            index: jax.Array,
        ) -> tuple[StreamPair | None, Sums]:
            run = stage.gradient
            assert run is not None
            pair, d_pair = stream or _NONE, d_stream or _NONE
            signs = self._draw_signs(stage, params, step, index, number)

            def function(params: Params, stream: Stream | None, d_stream: Stream | None) -> tuple[PyTree, Params]:
                d_input, sums = run(params, stream, handed_on, batch, number, d_stream, step, index)
                return d_input, sums.tree

            primals, tangents = (params, pair.value, d_pair.value), (signs, pair.tangent, d_pair.tangent)
            values, along = jvp_of_gradient(function, primals, tangents)
            d_input = None if stream is None else StreamPair(values[0], along[0])
            # The gradient of a table of embeddings, for example, does not read the table.
            unread = {name: x for name, x in along[1].items() if name not in signs}
            signs = {**signs, **self._draw_signs(stage, unread, step, index, number)}
            return d_input, _multiply_by_signs(signs, along[1])

        return replace(stage, forward=stage.forward and forward, gradient=gradient)

    def _draw_signs(
        self, stage: StageFunctions, params: Params, step: jax.Array, index: jax.Array, number: jax.Array | None
    ) -> Params:
        """Draws signs for parameters of a stage, in the dtypes of `params`; for layer `number`, the same as
        `hutchinson` draws.
        """
        key = self.loss.microbatch_key(step, index)
        assert key is not None
        shapes = {name: x.shape for name, x in self.loss.model.shapes.items()}
        keys = dict(zip(shapes, sign_keys(key, len(shapes)), strict=True))
        if number is None or stage.layers is None:
            return {name: jax.random.rademacher(keys[name], shapes[name], x.dtype) for name, x in params.items()}
        row = stage.row_of(number)
        return {name: rademacher_row(keys[name], shapes[name], row, x.dtype) for name, x in params.items()}


def rademacher_row(key: jax.Array, shape: tuple[int, ...], row: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Computes `jax.random.rademacher(key, shape, dtype)[row]` without drawing the other rows.

    JAX draws element i of an array from the i-th block of the cipher; see `jax_threefry_partitionable`.

    Args:
        key: a threefry key.
        shape: shape of the full array, with the row axis first. A row has at most 2^32 elements.
        row: index of the row, an int32 scalar.
        dtype: dtype of the signs.
    """
    size = math.prod(shape[1:])
    starts = np.arange(shape[0], dtype=np.uint64) * np.uint64(size)
    high, low = (jnp.asarray(half.astype(np.uint32))[row] for half in (starts >> np.uint64(32), starts))
    low_E = low[None] + jnp.arange(size, dtype=jnp.uint32)
    high_E = high[None] + (low_E < low[None]).astype(jnp.uint32)
    first_E, second_E = jnp.split(threefry_2x32(jax.random.key_data(key), jnp.concatenate([high_E, low_E])), 2)
    # -1 if the uniform number in [0, 1) is at least 1/2, which is the case if its first bit is 1.
    negative_E = (first_E ^ second_E) >> 31
    return (1 - 2 * negative_E.astype(jnp.int32)).astype(dtype).reshape(shape[1:])


def _jvp(function: Callable[..., PyTree], primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]) -> PyTree:
    """Same as `jax.jvp`, but also works for functions whose custom derivative is only for reverse mode."""
    return jvp_of_gradient(lambda *args: jax.vjp(function, *args)[0], primals, tangents)


def _multiply_by_signs(signs: Params, products: Params) -> Sums:
    # Gradients have a leading axis over batch shards.
    return Sums({}, {name: signs[name][None] * product for name, product in products.items()})
