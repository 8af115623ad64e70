"""A model laid out for decoding on a CPU, where a few rows meet every weight once for each token.

XLA:CPU copies the layers that it takes out of a stack, and packs the right side of a product anew each time. Both take
as long as reading the weights does, which is all that has to be done. So each layer has arrays of its own, its keys
and values as well, and each matrix lies transposed, for the left side of products.

Shape letters: M rows, I inputs of a linear map, O its outputs, V vocabulary, D hidden dimension.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from lm_trainer.core.broadcast import with_rank_of
from lm_trainer.nn.cache import SplitKvCache
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.linear import Linear


def for_decoding(model: Decoder, dtype: DTypeLike = jnp.float32) -> Decoder:
    """Returns a model with the same results, up to rounding, for `generate` with the same `dtype`.

    The matrices of linear maps are copied, in `dtype`. A model that does not lie on one CPU device is returned itself.
    """
    graph, state = nnx.split(model)
    devices = {device for leaf in jax.tree.leaves(state) for device in _devices(leaf)}
    if [device.platform for device in devices] != ["cpu"]:
        return model
    # A new module of the same arrays: the one that is given stays as it is.
    laid_out = nnx.merge(graph, jax.tree.map(jnp.asarray, state))
    layers = len(laid_out.spec.blocks)
    period = len(laid_out.blocks)
    rows = [_rows(laid_out.blocks[str(j)], -(-(layers - j) // period)) for j in range(period)]
    laid_out.blocks = nnx.Dict({str(i): rows[i % period][i // period] for i in range(layers)})
    laid_out.spec = dataclasses.replace(laid_out.spec, scan=False)
    for _, module in list(nnx.iter_modules(laid_out)):
        for name, child in list(vars(module).items()):
            if isinstance(child, Linear) and child.matmul is jnp.matmul:
                setattr(module, name, _TransposedLinear(child, dtype))
    laid_out.set_cache(SplitKvCache)
    laid_out.set_head_matmul(_head_from_the_left)
    return laid_out


def _devices(array: jax.Array | np.ndarray) -> Set[Any]:
    """The devices that an array lies on, or goes to: those of NumPy's go to JAX's default."""
    return array.devices() if isinstance(array, jax.Array) else jnp.empty(0).devices()


class _TransposedLinear(nnx.Module):
    """As the linear map that it is made of, whose parameters may be those of a stack of one layer."""

    def __init__(self, linear: Linear, dtype: DTypeLike):
        self.in_shape, self.out_shape = linear.in_shape, linear.out_shape
        weight = np.asarray(linear.weight[...])
        stacked = weight.shape[: weight.ndim - len(self.in_shape) - len(self.out_shape)]
        flat = weight.reshape(*stacked, math.prod(self.in_shape), math.prod(self.out_shape))
        self.weight_OI = nnx.Param(_copied(np.swapaxes(flat, -1, -2), dtype))
        self.bias = linear.bias
        self.lora = nnx.data(linear.lora)

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        lead = x.shape[: x.ndim - len(self.in_shape)]
        w_OI = self.weight_OI[...].astype(x.dtype)
        x_MI = x.reshape(-1, w_OI.shape[1])
        y_MO = _from_the_left(x_MI, w_OI)
        if self.lora is not None:
            y_MO = y_MO + self.lora(x_MI, key)
        y = y_MO.reshape(*lead, *self.out_shape)
        return y if self.bias is None else y + with_rank_of(self.bias[...].astype(x.dtype), y)


def _from_the_left(x_MI: jax.Array, w_OI: jax.Array, **options: Any) -> jax.Array:
    """The product [M, O] of the rows with the transpose of the matrix."""
    # Without the barriers the compiler would turn the product round.
    x_IM = jax.lax.optimization_barrier(x_MI.T)
    return jax.lax.optimization_barrier(jnp.matmul(w_OI, x_IM, **options)).T


def _head_from_the_left(h_MD: jax.Array, w_VD: jax.Array) -> jax.Array:
    return _from_the_left(h_MD, w_VD, preferred_element_type=jnp.float32)


def _rows(block: nnx.Module, count: int) -> list[Any]:
    """The layers of a stack, each as a stack of one."""
    stack = jax.tree.map(np.asarray, block)
    taken = lambda row: jax.tree.map(lambda leaf: jnp.asarray(leaf[row : row + 1]), stack)  # noqa: E731
    return [taken(row) for row in range(count)]


def _copied(values: np.ndarray, dtype: DTypeLike) -> jax.Array:
    # By NumPy: JAX would compile a program for every shape.
    return jnp.asarray(np.ascontiguousarray(values.astype(dtype, copy=False)))
