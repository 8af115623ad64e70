"""A layer whose forward pass saves residuals, so that its backward pass does not recompute them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import jax
from jax.extend.core import Var

from lm_trainer.core.batch import Batch
from lm_trainer.core.jax_types import PyTree
from lm_trainer.nn.stages import Stream
from lm_trainer.step.loss.gradient import Sums

Params = Mapping[str, jax.Array]


@dataclass(frozen=True)
class SavingLayer:
    """A layer that is compiled to two programs, forward and backward.

    Both trace `jax.vjp` of the layer. Of the residuals that JAX saves, `forward` returns those that depend on the
    stream or on random numbers. `gradient` takes them instead of computing its own, which then become dead code. The
    other residuals, such as reshaped weights or a mask, depend only on parameters and batch. `gradient` recomputes
    them, because otherwise every microbatch and layer would hold a copy.
    """

    layer: Callable[..., Stream]
    """`layer(params, stream, batch, number, step, index)` returns the output of the layer."""
    trainable: Collection[str]
    """Names of the parameters that have a gradient."""

    def forward(
        self, params: Params, stream: Stream, batch: Batch, number: jax.Array, step: jax.Array, index: jax.Array
    ) -> tuple[Stream, list[jax.Array]]:
        """Returns the output of the layer, and the residuals for `gradient`."""
        arguments = (params, stream, batch, number, step, index)
        output, vjp = self._vjp(*arguments)
        saved = zip(jax.tree.leaves(vjp), self._find_saved_residuals(*arguments), strict=True)
        # The memory is the same as in the input, which the host keeps.
        return output._replace(memory=None), [x for x, is_saved in saved if is_saved]

    def gradient(  # noqa: PLR0913 - the arguments of the layer, residuals and derivative
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
        """Returns the derivative of the loss with respect to the input of the layer, and the gradient of its
        parameters.

        Args:
            params: as for `forward`.
            stream: as for `forward`.
            handed_on: residuals returned by `forward`.
            batch: as for `forward`.
            number: as for `forward`.
            d_stream: derivative of the loss with respect to the output of the layer.
            step: as for `forward`.
            index: as for `forward`.
        """
        arguments, residuals = (params, stream, batch, number, step, index), iter(handed_on)
        leaves, structure = jax.tree.flatten(self._vjp(*arguments)[1])
        saved = zip(leaves, self._find_saved_residuals(*arguments), strict=True)
        leaves = [next(residuals) if is_saved else x for x, is_saved in saved]
        grads, d_input = jax.tree.unflatten(structure, leaves)(d_stream)
        return d_input, Sums({}, {name: x[None] for name, x in grads.items()})

    def _vjp(self, params: Params, stream: Stream, *others: PyTree) -> tuple[Stream, PyTree]:
        """Returns the results of `jax.vjp`; the second result is a tree of residuals."""

        def function(trained: Params, stream: Stream) -> Stream:
            return self.layer({**params, **trained}, stream, *others)

        return jax.vjp(function, {name: x for name, x in params.items() if name in self.trainable}, stream)

    def _find_saved_residuals(self, params: Params, stream: Stream, batch: Batch, *scalars: jax.Array) -> list[bool]:
        """Returns, for each residual of `jax.vjp`, true if `forward` returns it."""

        def values(stream: Stream, scalars: PyTree, params: Params, batch: Batch) -> list[jax.Array]:
            return jax.tree.leaves(self._vjp(params, stream, batch, *scalars)[1])

        jaxpr = jax.make_jaxpr(values)(stream, scalars, params, batch).jaxpr
        varying = set(jaxpr.invars[: len(jax.tree.leaves((stream, scalars)))])
        for equation in jaxpr.eqns:
            # The other variables are literals, such as the 1 of x + 1.
            if any(isinstance(var, Var) and var in varying for var in equation.invars):
                varying |= set(equation.outvars)
        saved = varying - set(jaxpr.invars)
        return [isinstance(var, Var) and var in saved for var in jaxpr.outvars]
