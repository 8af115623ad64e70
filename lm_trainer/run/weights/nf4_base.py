"""The frozen base of an adapter in 4 bits: the arrays of its quantized weights.

Shape letters: L layers, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from lm_trainer.core.nf4 import Nf4Matrix, dequantize_matrix, quantize_matrix
from lm_trainer.nn.nf4 import find_nf4_weights

T = TypeVar("T")


def quantize_params(params: Mapping[str, np.ndarray], shapes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Quantizes weights on the host, so the result is the same on every mesh.

    Args:
        params: parameters by dotted name, in any float dtype.
        shapes: shapes of the parameters of the model, with codes for its quantized weights.
    """
    quantized = find_nf4_weights(shapes)
    result = {name: x for name, x in params.items() if name not in quantized}
    for name, shape in quantized.items():
        w_LIO = np.asarray(params[name]).reshape(math.prod(shape[:-2]), -1, shape[-2])
        result |= quantized_arrays(name, shape, list(w_LIO), lambda w_IO: quantize_matrix(w_IO.T))
    return result


def expected_shapes(params: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the shapes that the parameters of a base should have before it is quantized.

    Args:
        params: the parameters of the base, which have the dimensions of a weight that a matrix merges.
        shapes: as for `quantize_params`.
    """
    quantized = find_nf4_weights(shapes)
    expected = {name: x for name, x in shapes.items() if name.rpartition(".")[0] not in quantized}
    for name, (*lead, outputs, size) in quantized.items():
        merged = np.broadcast_to(np.float32(0), (*lead, 2 * size, outputs))
        same_size = name in params and math.prod(params[name].shape) == merged.size
        expected[name] = params[name] if same_size else merged
    return expected


def quantized_arrays(
    name: str, shape: tuple[int, ...], layers: Sequence[T], quantize: Callable[[T], Nf4Matrix]
) -> dict[str, np.ndarray]:
    """Quantizes the layers of a weight, several at a time, and returns the stacked arrays by dotted name.

    Args:
        name: dotted name of the weight.
        shape: shape of its codes.
        layers: sources of the layers.
        quantize: quantizes a layer.
    """
    with ThreadPoolExecutor() as pool:
        matrices = list(pool.map(quantize, layers))
    stacks = Nf4Matrix(*(np.stack(arrays) for arrays in zip(*matrices, strict=True)))
    return {f"{name}.{array}": x.reshape(*shape[:-2], *x.shape[1:]) for array, x in stacks._asdict().items()}


def dequantize_params(params: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Replaces the arrays of quantized weights by their values, in float32.

    Args:
        params: parameters by dotted name, with the arrays of quantized weights.
        shapes: shapes of the parameters of the model without quantization.
    """
    quantized = find_nf4_weights(params)
    arrays_of = {name: [f"{name}.{array}" for array in Nf4Matrix._fields] for name in quantized}
    stored = {array for names in arrays_of.values() for array in names}
    result = {name: x for name, x in params.items() if name not in stored}
    for name, names in arrays_of.items():
        layers, arrays = math.prod(quantized[name][:-2]), [params[array] for array in names]
        lead = len(quantized[name]) - 2
        stacks = Nf4Matrix(*(x.reshape(layers, *x.shape[lead:]) for x in arrays))
        values = [dequantize_matrix(Nf4Matrix(*row)).T for row in zip(*stacks, strict=True)]
        result[name] = np.stack(values).reshape(shapes[name])
    return result
