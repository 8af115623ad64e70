"""Reads matrices of experts in MXFP4 (OCP Microscaling specification 1.0): 4-bit floats, with a shared power of two for
each block of 32.

A matrix is two tensors in a file: `..._blocks` has two elements per byte, the first one in the lower bits, and
`..._scales` has the exponent of each block, plus 127. Blocks are along the inputs of a matrix.

Shape letters: E experts, I inputs, O outputs, G blocks of inputs, H bytes of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.export.tensor_file import Region, StoredTensor, is_finite

MXFP4 = "MXFP4"
"""Name of the dtype."""

_BLOCK = 32
"""Number of elements of a block."""
_BIAS, _NAN = 127, 255
"""Exponent that means 1, and exponent that means that no element is a number."""
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_POSITIVE, *(-x for x in _POSITIVE)], np.float32)
"""Value of each code."""
_CODES = ("_blocks", "_scales")


class Mxfp4Tensor(NamedTuple):
    """The matrices of all experts of a layer, [E, I, O], read like a `StoredTensor` of float32."""

    name: str
    blocks_EOGH: StoredTensor
    scales_EOG: StoredTensor

    @property
    def file(self) -> Path:
        """File of the elements."""
        return self.blocks_EOGH.file

    @property
    def dtype(self) -> str:
        """Always `MXFP4`."""
        return MXFP4

    @property
    def numpy_dtype(self) -> np.dtype:
        """Dtype of what `read` returns, which holds every value exactly."""
        return np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of experts, inputs and outputs."""
        experts, outputs, blocks = self.scales_EOG.shape
        return experts, blocks * _BLOCK, outputs

    def read(self, region: Region = ()) -> np.ndarray:
        """Reads a region, by default everything, as float32. Only the blocks that overlap the region are read.

        Raises:
            UserError: for values that are not finite.
            MachineError: if the file has become unreadable.
        """
        full = (*region, *(slice(None),) * (3 - len(region)))
        bounds = [slice(*part.indices(size)) for part, size in zip(full, self.shape, strict=True)]
        experts, inputs, outputs = bounds
        blocks = slice(inputs.start // _BLOCK, -(-inputs.stop // _BLOCK))
        codes_EOGH = self.blocks_EOGH.read((experts, outputs, blocks, slice(0, _BLOCK // 2)))
        exponents_EOG = self.scales_EOG.read((experts, outputs, blocks))
        pairs = np.stack([codes_EOGH & 0xF, codes_EOGH >> 4], axis=-1)
        values = _VALUES[pairs.reshape(*exponents_EOG.shape, _BLOCK)]
        with np.errstate(over="ignore"):
            values = np.ldexp(values, exponents_EOG[..., None].astype(np.int32) - _BIAS)
        if (exponents_EOG == _NAN).any() or not is_finite(values):
            raise UserError(f"{self.file}: {self.name} holds NaN or infinite values; use a sound copy of it")
        values_EOI = values.reshape(*exponents_EOG.shape[:2], -1)
        first = inputs.start - blocks.start * _BLOCK
        return values_EOI[:, :, first : first + inputs.stop - inputs.start].swapaxes(1, 2)


def join_mxfp4(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | Mxfp4Tensor]:
    """Replaces each pair of tensors with elements and exponents by the tensor that they mean.

    Raises:
        UserError: for a pair that does not fit together.
    """
    joined: dict[str, StoredTensor | Mxfp4Tensor] = dict(stored)
    for blocks_name in [name for name in stored if name.endswith(_CODES[0])]:
        name = blocks_name.removesuffix(_CODES[0])
        blocks, scales = stored[blocks_name], stored.get(name + _CODES[1])
        if scales is None or blocks.dtype != "U8" or scales.dtype != "U8":
            continue
        if len(scales.shape) != 3 or blocks.shape != (*scales.shape, _BLOCK // 2):
            raise UserError(
                f"{blocks.file}: {blocks_name} has the shape {list(blocks.shape)}, which does not fit the shape "
                f"{list(scales.shape)} of {scales.name}; MXFP4 has {_BLOCK // 2} bytes for each exponent"
            )
        if name in stored:
            raise UserError(f"{blocks.file}: {name!r} is there both as MXFP4 and as {stored[name].dtype}")
        del joined[blocks_name], joined[scales.name]
        joined[name] = Mxfp4Tensor(name, blocks, scales)
    return joined
