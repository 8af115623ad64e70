"""A layer whose forward pass hands values on to its derivative, which then does not compute them again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Var

from lm_trainer.core.batch import Batch
from lm_trainer.nn.stages import Stream
from lm_trainer.step.loss.gradient import Sums

Params = Mapping[str, jax.Array]


@dataclass(frozen=True)
class SavingLayer:
    """A layer in two programs.

    Both trace the derivative of the layer. Of the values that JAX keeps for it, `forward` returns those that follow
    from the stream or from random numbers; in `gradient` they take the place of its own, which nobody then computes.
    The others follow from parameters and batch, such as weights in another shape or a mask: `gradient` makes them anew,
    since the microbatches and layers would each hold a copy.
    """

    layer: Callable[..., Stream]
    """`layer(params, stream, batch, number, step, index)`: the stream after it."""
    trainable: Collection[str]
    """The parameters that have a gradient."""

    def forward(
        self, params: Params, stream: Stream, batch: Batch, number: jax.Array, step: jax.Array, index: jax.Array
    ) -> tuple[Stream, list[jax.Array]]:
        """The stream after the layer, and the values that `gradient` takes."""
        arguments = (params, stream, batch, number, step, index)
        after, derivative = self._differentiated(*arguments)
        return after, [x for x, kept in zip(jax.tree.leaves(derivative), self._kept(*arguments), strict=True) if kept]

    def gradient(  # noqa: PLR0913 - the layer's own, and the derivative
        self,
        params: Params,
        stream: Stream,
        handed_on: list[jax.Array],
        batch: Batch,
        number: jax.Array,
        d_stream: Stream,
        step: jax.Array,
        index: jax.Array,
    ) -> tuple[Stream, Sums]:
        """The derivative of the loss for what enters the layer, and the gradient for its parameters.

        Args:
            params: as for `forward`.
            stream: as for `forward`.
            handed_on: the values that `forward` returned.
            batch: as for `forward`.
            number: as for `forward`.
            d_stream: the derivative for what leaves the layer.
            step: as for `forward`.
            index: as for `forward`.
        """
        arguments, given = (params, stream, batch, number, step, index), iter(handed_on)
        leaves, structure = jax.tree.flatten(self._differentiated(*arguments)[1])
        leaves = [next(given) if kept else x for x, kept in zip(leaves, self._kept(*arguments), strict=True)]
        grads, before = jax.tree.unflatten(structure, leaves)(d_stream)
        return before, Sums({}, {name: x[None] for name, x in grads.items()})

    def _differentiated(self, params: Params, stream: Stream, *others: Any) -> tuple[Stream, Any]:
        """The results of `jax.vjp`, whose derivative is a tree of the values that it keeps."""

        def function(chosen: Params, stream: Stream) -> Stream:
            return self.layer({**params, **chosen}, stream, *others)

        return jax.vjp(function, {name: x for name, x in params.items() if name in self.trainable}, stream)

    def _kept(self, params: Params, stream: Stream, batch: Batch, *scalars: Any) -> list[bool]:
        """Tells which of the values are to be handed on, in the order of the derivative's leaves."""

        def values(stream: Stream, scalars: Any, params: Params, batch: Batch) -> list[Any]:
            return jax.tree.leaves(self._differentiated(params, stream, batch, *scalars)[1])

        jaxpr = jax.make_jaxpr(values)(stream, scalars, params, batch).jaxpr
        varying = set(jaxpr.invars[: len(jax.tree.leaves((stream, scalars)))])
        for equation in jaxpr.eqns:
            # The others are literals, such as the 1 of x + 1.
            if any(isinstance(var, Var) and var in varying for var in equation.invars):
                varying |= set(equation.outvars)
        handed_on = varying - set(jaxpr.invars)
        return [isinstance(var, Var) and var in handed_on for var in jaxpr.outvars]
