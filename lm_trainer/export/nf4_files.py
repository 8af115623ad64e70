"""Tensors that bitsandbytes has quantized to NF4, read from their arrays in a safetensors file.

Shape letters: O outputs, I inputs, N elements (O x I), K blocks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.core.nf4 import BLOCK, GROUP, NF4_VALUES, SCALE_VALUES, Nf4Matrix, dequantize_scales
from lm_trainer.export.mxfp4_tensor import Mxfp4Tensor
from lm_trainer.export.tensor_file import Region, StoredTensor

_STATE, _NF4 = ".quant_state.bitsandbytes__", "nf4"
_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_REMEDY = "save the model dequantized (transformers: `dequantize()`)"


@dataclass(frozen=True)
class Nf4Tensor:
    """A quantized tensor of a file, with the interface of `StoredTensor`."""

    name: str
    file: Path
    shape: tuple[int, ...]
    """Shape of the values: [O, I]."""
    state: Mapping[str, Any]
    """Settings of the quantization."""
    arrays: Mapping[str, StoredTensor]
    """Arrays of the quantization by the end of their names; the codes have none."""
    dtype: str = "NF4"

    @property
    def numpy_dtype(self) -> np.dtype:
        """The NumPy dtype of the values."""
        return np.dtype(np.float32)

    def read(self, region: Region = ()) -> np.ndarray:
        """Reads a region of the values, by default all of them, as float32.

        The values are rounded to the dtype that the model had before it was quantized, as bitsandbytes rounds them.
        """
        bounds = zip(region or (slice(None),) * 2, self.shape, strict=True)
        rows, columns = (slice(*part.indices(size)[:2]) for part, size in bounds)
        inputs, size = self.shape[1], self.state["blocksize"]
        first, last = rows.start * inputs // size, -(-rows.stop * inputs // size)
        begin, end = first * size, min(last * size, math.prod(self.shape))
        codes_C = self.arrays[""].read((slice(begin // 2, -(-end // 2)), slice(0, 1))).reshape(-1)
        codes_N = np.stack([codes_C >> 4, codes_C & 15], axis=-1).reshape(-1)[: end - begin]
        factors_K = self._scales()[first:last]
        values_N = NF4_VALUES[codes_N] * np.repeat(factors_K, size)[: len(codes_N)]
        start = rows.start * inputs - begin
        values_OI = values_N[start : start + (rows.stop - rows.start) * inputs].reshape(-1, inputs)
        return values_OI[:, columns].astype(_DTYPES[self.state["dtype"]]).astype(np.float32)

    def read_matrix(self) -> Nf4Matrix:
        """Reads the arrays as they are in the file.

        Raises:
            UserError: if the blocks or the scales are not as in `lm_trainer.core.nf4`.
        """
        sizes = self.state["blocksize"], self.state.get("nested_blocksize")
        # The values of the 8-bit type are computed by torch, and on some machines rounded differently.
        if sizes != (BLOCK, GROUP) or not np.allclose(self.arrays[".nested_quant_map"].read(), SCALE_VALUES, 1e-6, 0):
            raise UserError(
                f"{self.file}: {self.name} has blocks of {sizes[0]} elements and "
                f"{'scales that are not quantized' if sizes[1] is None else f'groups of {sizes[1]} blocks'}; "
                f"adapter.base_quantization: nf4 needs {BLOCK}, and scales in 8 bits in groups of {GROUP} "
                f"(bnb_4bit_use_double_quant): quantize the model that it was made from, or {_REMEDY}"
            )
        return Nf4Matrix(
            self.arrays[""].read().reshape(self.shape[0], -1),
            self.arrays[".absmax"].read(),
            self.arrays[".nested_absmax"].read(),
            np.array(self.state["nested_offset"], np.float32),
        )

    def _scales(self) -> np.ndarray:
        """Returns the factors of the blocks, float32 [K]."""
        absmax_K = self.arrays[".absmax"].read()
        if "nested_blocksize" not in self.state:
            return absmax_K.astype(np.float32)
        groups = self.arrays[".nested_absmax"].read(), np.array(self.state["nested_offset"], np.float32)
        values = self.arrays[".nested_quant_map"].read()
        return dequantize_scales(absmax_K, *groups, values, size=self.state["nested_blocksize"])


def join_nf4(stored: Mapping[str, StoredTensor | Mxfp4Tensor]) -> dict[str, StoredTensor | Mxfp4Tensor | Nf4Tensor]:
    """Replaces the arrays of each tensor that is quantized to NF4 by one `Nf4Tensor` with the name of its codes.

    Raises:
        UserError: for another format of bitsandbytes, and for arrays that are missing or damaged.
    """
    states = {name: name.partition(_STATE) for name in stored if _STATE in name}
    joined: dict[str, StoredTensor | Mxfp4Tensor | Nf4Tensor] = dict(stored)
    for key, (name, _, kind) in states.items():
        state = stored[key]
        if kind != _NF4 or not isinstance(state, StoredTensor):
            raise UserError(f"{state.file}: {name} is quantized to {kind}, which is not read; {_REMEDY}")
        arrays = {end: joined.pop(f"{name}{end}", None) for end in ("", *_ENDS)}
        del joined[key]
        joined[name] = _make_tensor(name, state, {n: x for n, x in arrays.items() if isinstance(x, StoredTensor)})
    return joined


_ENDS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")


def _make_tensor(name: str, state_tensor: StoredTensor, arrays: Mapping[str, StoredTensor]) -> Nf4Tensor:
    state = _read_state(state_tensor)
    shape, size, group = tuple(state["shape"]), state["blocksize"], state.get("nested_blocksize")
    blocks = -(-math.prod(shape) // size)
    expected = {"": (-(-math.prod(shape) // 2), 1), ".absmax": (blocks,), ".quant_map": (16,)}
    if group is not None:
        expected |= {".nested_absmax": (-(-blocks // group),), ".nested_quant_map": (256,)}
    for end, expected_shape in expected.items():
        actual = arrays[end].shape if end in arrays else None
        if actual != expected_shape:
            problem = "is missing" if actual is None else f"has the shape {list(actual)}"
            raise UserError(f"{state_tensor.file}: {name}{end} {problem}, expected {list(expected_shape)}")
    if not np.array_equal(arrays[".quant_map"].read(), NF4_VALUES):
        raise UserError(f"{state_tensor.file}: {name}.quant_map has other values than NF4; {_REMEDY}")
    return Nf4Tensor(name, arrays[""].file, shape, state, arrays)


def _read_state(tensor: StoredTensor) -> dict[str, Any]:
    try:
        state = json.loads(tensor.read().tobytes())
        numbers = [*state["shape"], state["blocksize"], state.get("nested_blocksize", 1)]
        sound = len(state["shape"]) == 2 and all(isinstance(n, int) and n > 0 for n in numbers)
        sound = sound and state["quant_type"] == _NF4 and state["dtype"] in _DTYPES
        sound = sound and ("nested_blocksize" not in state or math.isfinite(state["nested_offset"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise UserError(f"{tensor.file}: {tensor.name} does not describe an NF4 matrix; {_REMEDY}")
    return state
