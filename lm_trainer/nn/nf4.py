"""Frozen weights of linear maps in 4-bit NormalFloat, dequantized by the layer that reads them.

Shape letters: O outputs, I inputs, C bytes with two codes each, N elements (O x I), K blocks, G groups of blocks, M
rows; `...` leading dimensions of stacked layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from lm_trainer.core.errors import UserError
from lm_trainer.core.nf4 import BLOCK, GROUP, NF4_VALUES, SCALE_VALUES, Nf4Matrix, matrix_shapes
from lm_trainer.nn.init import LOGICAL_AXES
from lm_trainer.nn.read import read

CODES = ".codes"
"""End of the name of the parameter with the codes of a weight; the name before it is the name of the weight."""
_FSDP_AXIS = "embed"
"""Logical axis along which weights are sharded in storage."""


class CodeParam(nnx.Param):
    """An array of a quantized weight. Its dtype does not depend on the parameter dtype of a run."""


class Nf4Weight(nnx.Module):
    """The weight of a linear map as the arrays of an `Nf4Matrix`.

    Codes are gathered, not values, so devices exchange a quarter of the bytes of a bfloat16 weight.

    Args:
        weight: the weight, [..., *inputs, *outputs]; only its shape and axes are used. All codes are 0 until values are
            loaded.
        num_inputs: number of dimensions of the inputs.
        num_outputs: number of dimensions of the outputs.
    """

    def __init__(self, weight: nnx.Param, num_inputs: int, num_outputs: int):
        shape, axes = weight.get_value().shape, tuple(weight.get_metadata(LOGICAL_AXES))
        lead = len(shape) - num_inputs - num_outputs
        self.in_shape, self.out_shape = shape[lead : lead + num_inputs], shape[lead + num_inputs :]
        arrays = matrix_shapes(math.prod(self.out_shape), math.prod(self.in_shape))
        # Dimensions that the matrix merges are sharded like the first of them.
        sharded = {
            "codes": (axes[lead + num_inputs], axes[lead]),
            "scales": (_FSDP_AXIS if _FSDP_AXIS in axes[lead:] else None,),
            "group_scales": (None,),
            "offset": (),
        }
        for name, array in arrays._asdict().items():
            zeros = jnp.zeros((*shape[:lead], *array.shape), array.dtype)
            setattr(self, name, CodeParam(zeros, logical_axes=(*axes[:lead], *sharded[name])))

    def matrix(self, dtype: DTypeLike | None) -> jax.Array:
        """Returns the weight, [..., *inputs, *outputs] in `dtype`; None is float32."""
        w_OI = dequantize(*self._arrays()).astype(jnp.float32 if dtype is None else dtype)
        return jnp.swapaxes(w_OI, -1, -2).reshape(*w_OI.shape[:-2], *self.in_shape, *self.out_shape)

    def product(self, x_MI: jax.Array, matmul: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        """Computes `matmul(x, w)`, [M, O] in the dtype of `x_MI`.

        The backward pass dequantizes again: otherwise the values of all layers would be in memory at once.
        """

        @jax.checkpoint
        def multiply(x_MI: jax.Array, *arrays: jax.Array) -> jax.Array:
            return matmul(x_MI, dequantize(*arrays).astype(x_MI.dtype).T)

        return multiply(x_MI, *self._arrays())

    def _arrays(self) -> tuple[jax.Array, ...]:
        # Under the types of Flax, attributes that are set by name are unknown.
        this: Any = self
        return tuple(read(getattr(this, name)) for name in Nf4Matrix._fields)


def dequantize(codes_OC: jax.Array, scales_K: jax.Array, group_scales_G: jax.Array, offset: jax.Array) -> jax.Array:
    """Returns float32 [..., O, I]; see `lm_trainer.core.nf4.dequantize_matrix`."""
    lead, outputs = codes_OC.shape[:-2], codes_OC.shape[-2]
    groups_K = jnp.repeat(group_scales_G, GROUP, axis=-1)[..., : scales_K.shape[-1]]
    factors_K = _look_up(SCALE_VALUES, scales_K) * groups_K + offset[..., None]
    codes_N = jnp.stack([codes_OC >> 4, codes_OC & 15], axis=-1).reshape(*lead, -1)
    values_N = _look_up(NF4_VALUES, codes_N)
    factors_N = jnp.repeat(factors_K, BLOCK, axis=-1)[..., : codes_N.shape[-1]]
    return (values_N * factors_N).reshape(*lead, outputs, -1)


def _look_up(values: np.ndarray, codes: jax.Array) -> jax.Array:
    return jnp.asarray(values).at[codes].get(mode="promise_in_bounds")


def quantize_linears(model: nnx.Module) -> None:
    """Replaces the weights of the linear maps of the blocks by zero codes, for values that are loaded later.

    Raises:
        UserError: for a linear map with an odd number of inputs.
    """
    # Imported here, because a linear map itself reads quantized weights.
    from lm_trainer.nn.linear import Linear

    linears = {".".join(map(str, path)): node for path, node in nnx.iter_graph(model) if isinstance(node, Linear)}
    for name, linear in linears.items():
        if not name.startswith("blocks."):
            continue
        if math.prod(linear.in_shape) % 2:
            raise UserError(
                f"adapter.base_quantization: model.{name} has {math.prod(linear.in_shape)} inputs; NF4 stores two of "
                f"them in a byte, so the number must be even: remove the key"
            )
        linear.freeze_in_nf4()


def find_nf4_weights(shapes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Finds the quantized weights among parameters: dotted name of the weight -> shape of its codes."""
    return {name.removesuffix(CODES): tuple(x.shape) for name, x in shapes.items() if name.endswith(f".weight{CODES}")}


def num_weights(name: str, shape: tuple[int, ...]) -> int:
    """Returns the number of weights of a model that the parameter with this dotted name stores.

    Codes are two in a byte, and scales are no weights.
    """
    weight, _, array = name.rpartition(".")
    if not weight.endswith(".weight") or array not in Nf4Matrix._fields:
        return math.prod(shape)
    return 2 * math.prod(shape) if f".{array}" == CODES else 0
