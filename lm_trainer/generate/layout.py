"""Layout of a model for decoding on a CPU, where every step reads all weights for only a few rows.

XLA:CPU copies each layer that it slices from a stack, and repacks the right operand of every matrix product. Each takes
as long as reading the weights, which is the only necessary work. In this layout, each layer has its own arrays,
including its keys and values, and each matrix is stored transposed, as the left operand of products.

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
from lm_trainer.nn.layer_sections import slot_of_each_layer
from lm_trainer.nn.linear import Linear
from lm_trainer.nn.mixer_spec import cache_sizes


def to_decoding_layout(model: Decoder, dtype: DTypeLike = jnp.float32) -> Decoder:
    """Returns a model that gives the same results up to rounding, for use in `generate` with the same `dtype`.

    The matrices of linear maps are copied and converted to `dtype`. Returns `model` itself unless all its parameters
    are on one CPU device and all its layers keep keys and values.
    """
    if any(cache_sizes(block.mixer) is None for block in model.spec.blocks):
        return model
    graph, state = nnx.split(model)
    devices = {device for leaf in jax.tree.leaves(state) for device in _devices_of(leaf)}
    if [device.platform for device in devices] != ["cpu"]:
        return model
    # A new module with the same arrays, so that the original stays unchanged.
    laid_out = nnx.merge(graph, jax.tree.map(jnp.asarray, state))
    layers_by_slot = laid_out.spec.layers_by_slot
    rows = [_single_layers(laid_out.blocks[str(slot)], len(layers)) for slot, layers in enumerate(layers_by_slot)]
    single_layers = [rows[slot][row] for slot, row in slot_of_each_layer(layers_by_slot)]
    laid_out.blocks = nnx.Dict({str(number): block for number, block in enumerate(single_layers)})
    laid_out.spec = dataclasses.replace(laid_out.spec, prefix=0, scan=False, multi_token=None)
    laid_out.multi_token = None
    for _, module in list(nnx.iter_modules(laid_out)):
        for name, child in list(vars(module).items()):
            if isinstance(child, Linear) and child.matmul is jnp.matmul:
                setattr(module, name, _TransposedLinear(child, dtype))
    laid_out.set_cache(SplitKvCache)
    laid_out.set_head_matmul(_left_head_matmul)
    return laid_out


def _devices_of(array: jax.Array | np.ndarray) -> Set[Any]:
    """Returns the devices that hold an array. NumPy arrays are placed on JAX's default device."""
    return array.devices() if isinstance(array, jax.Array) else jnp.empty(0).devices()


class _TransposedLinear(nnx.Module):
    """Equivalent to the linear map that it is made from. The parameters of that map may be a stack of one layer."""

    def __init__(self, linear: Linear, dtype: DTypeLike):
        self.in_shape, self.out_shape = linear.in_shape, linear.out_shape
        weight = np.asarray(linear.matrix())
        stacked = weight.shape[: weight.ndim - len(self.in_shape) - len(self.out_shape)]
        flat = weight.reshape(*stacked, math.prod(self.in_shape), math.prod(self.out_shape))
        self.weight_OI = nnx.Param(_to_contiguous(np.swapaxes(flat, -1, -2), dtype))
        self.bias = linear.bias
        self.lora = nnx.data(linear.lora)

    def matrix(self, dtype: DTypeLike) -> jax.Array:
        """Same as `Linear.matrix`."""
        return self.weight_OI[...].astype(dtype).T.reshape(*self.in_shape, *self.out_shape)

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        leading_shape = x.shape[: x.ndim - len(self.in_shape)]
        w_OI = self.weight_OI[...].astype(x.dtype)
        x_MI = x.reshape(-1, w_OI.shape[1])
        y_MO = _left_matmul(x_MI, w_OI)
        if self.lora is not None:
            y_MO = y_MO + self.lora(x_MI, key)
        y = y_MO.reshape(*leading_shape, *self.out_shape)
        return y if self.bias is None else y + with_rank_of(self.bias[...].astype(x.dtype), y)


def _left_matmul(x_MI: jax.Array, w_OI: jax.Array, **options: Any) -> jax.Array:
    """Computes the product [M, O] of the rows `x_MI` and the transpose of the matrix `w_OI`."""
    # Without the barriers the compiler would swap the operands of the product.
    x_IM = jax.lax.optimization_barrier(x_MI.T)
    return jax.lax.optimization_barrier(jnp.matmul(w_OI, x_IM, **options)).T


def _left_head_matmul(h_MD: jax.Array, w_VD: jax.Array) -> jax.Array:
    return _left_matmul(h_MD, w_VD, preferred_element_type=jnp.float32)


def _single_layers(block: nnx.Module, count: int) -> list[Any]:
    """Splits a stack of layers into stacks of one layer."""
    stack = jax.tree.map(np.asarray, block)
    layer_at = lambda row: jax.tree.map(lambda leaf: jnp.asarray(leaf[row : row + 1]), stack)  # noqa: E731
    return [layer_at(row) for row in range(count)]


def _to_contiguous(values: np.ndarray, dtype: DTypeLike) -> jax.Array:
    # NumPy, because JAX would compile a program for every shape.
    return jnp.asarray(np.ascontiguousarray(values.astype(dtype, copy=False)))
