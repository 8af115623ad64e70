"""NF4: values, blocks and scales beside their definition in the paper, and beside what bitsandbytes wrote."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from statistics import NormalDist
from typing import Any

import jax
import numpy as np
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.core.nf4 import NF4_VALUES, SCALE_VALUES, Nf4Matrix, dequantize_matrix, quantize_matrix
from lm_trainer.export.nf4_files import Nf4Tensor
from lm_trainer.export.weights import Weights
from lm_trainer.nn.nf4 import dequantize
from tests.core.golden.make_nf4 import ROWS, make_matrix

GOLDEN = Path(__file__).parent / "golden" / "nf4.json"
ENDS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".quant_state.bitsandbytes__nf4")


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    stored = json.loads(GOLDEN.read_text())
    return {
        name: np.frombuffer(base64.b64decode(x["data"]), x["dtype"]).reshape(x["shape"])
        for name, x in stored.items()
        if isinstance(x, dict)
    }


def test_the_values_are_quantiles_of_the_normal_distribution() -> None:
    # Appendix E: eight steps to the largest negative quantile, seven to the positive one, and an exact zero.
    quantile, offset = NormalDist().inv_cdf, 0.9677083
    positive = [quantile(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
    negative = [-quantile(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    expected = np.sort([*positive, 0.0, *negative])
    np.testing.assert_allclose(NF4_VALUES, expected / expected.max(), atol=2e-7)


def nearest(x: np.ndarray, values: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Code of each element and factor of each block, element by element."""
    codes, factors = [], []
    for start in range(0, len(x), size):
        block = x[start : start + size]
        factors.append(np.abs(block).max())
        for element in block:
            distances = np.abs(np.float64(element) / np.float64(factors[-1]) - values)
            codes.append(int(distances.argmin()))
    return np.array(codes), np.array(factors, np.float32)


@pytest.mark.parametrize(("outputs", "inputs"), [(3, 128), (5, 50)])
def test_a_matrix_has_the_nearest_value_of_each_element_and_scale(outputs: int, inputs: int) -> None:
    w_OI = np.random.default_rng(0).standard_normal((outputs, inputs)).astype(np.float32)
    matrix = quantize_matrix(w_OI)
    codes, factors = nearest(w_OI.reshape(-1), NF4_VALUES, 64)
    np.testing.assert_array_equal(matrix.codes.reshape(-1), codes[::2] * 16 + codes[1::2])
    offset = factors.astype(np.float64).mean().astype(np.float32)
    scale_codes, scale_factors = nearest(factors - offset, SCALE_VALUES, 256)
    np.testing.assert_array_equal(matrix.scales, scale_codes)
    np.testing.assert_array_equal(matrix.group_scales, scale_factors)
    expected = SCALE_VALUES[scale_codes] * scale_factors[0] + offset
    values = NF4_VALUES[codes] * np.repeat(expected, 64)[: len(codes)]
    np.testing.assert_array_equal(dequantize_matrix(matrix).reshape(-1), values)


def test_arrays_are_those_of_bitsandbytes(golden: dict[str, np.ndarray]) -> None:
    matrix = quantize_matrix(make_matrix())
    np.testing.assert_array_equal(matrix.codes.reshape(-1, 1), golden["weight"])
    np.testing.assert_allclose(matrix.group_scales, golden["weight.nested_absmax"], rtol=1e-6)
    # Its CPU kernel finds the nearest scale with a coarse table, so four of 270 are the neighbour of the nearest one.
    # Its kernels for other devices compare the distances.
    steps = np.abs(matrix.scales.astype(int) - golden["weight.absmax"])
    assert steps.max() <= 1
    assert steps.sum() <= 4
    np.testing.assert_allclose(dequantize_matrix(matrix)[:ROWS], golden["dequantized"], rtol=0.02)
    np.testing.assert_array_equal(SCALE_VALUES, golden["weight.nested_quant_map"])


def test_devices_compute_the_same_values() -> None:
    matrix = quantize_matrix(make_matrix())
    stacked = Nf4Matrix(*(np.stack([x, x]) for x in matrix))
    expected = dequantize_matrix(matrix)
    # A compiler may round the product and the sum of a scale once instead of twice.
    np.testing.assert_allclose(jax.jit(dequantize)(*stacked), np.stack([expected, expected]), rtol=1e-6)


def test_a_block_of_zeros_stays_zero() -> None:
    w_OI = np.random.default_rng(0).standard_normal((2, 128)).astype(np.float32)
    w_OI[1, 64:] = 0
    values = dequantize_matrix(quantize_matrix(w_OI))
    assert not values[1, 64:].any()
    assert np.count_nonzero(values[1, :64]) > 50
    assert not dequantize_matrix(quantize_matrix(np.zeros((4, 32), np.float32))).any()


def write_file(directory: Path, golden: dict[str, np.ndarray], **changes: Any) -> Path:
    from safetensors.numpy import save_file

    tensors = {f"a.weight{end}": golden[f"weight{end}"] for end in ("", *ENDS)}
    tensors["b.weight"] = np.ones((2, 3), np.float32)
    state = {**json.loads(golden[f"weight{ENDS[-1]}"].tobytes()), **changes}
    tensors[f"a.weight{ENDS[-1]}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, directory / "model.safetensors")
    return directory


def test_a_file_of_bitsandbytes_is_read_in_any_region(golden: dict[str, np.ndarray], tmp_path: Path) -> None:
    weights = Weights(write_file(tmp_path, golden))
    expected = weights["a.weight"]
    assert set(weights) == {"a.weight", "b.weight"}
    assert weights.dtypes == {"NF4", "F32"}
    np.testing.assert_array_equal(expected[:ROWS], golden["dequantized"])
    for rows, columns in ((slice(0, 1), slice(3, 9)), (slice(7, 31), slice(0, 360)), (slice(47, 48), slice(359, 360))):
        np.testing.assert_array_equal(weights.stored["a.weight"].read((rows, columns)), expected[rows, columns])
    stored = weights.stored["a.weight"]
    assert isinstance(stored, Nf4Tensor)
    np.testing.assert_array_equal(dequantize_matrix(stored.read_matrix()), expected)
    half = Weights(write_file(tmp_path, golden, dtype="bfloat16"))["a.weight"]
    assert 0 < np.abs(half - expected).max() < 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_type": "fp4"}, "does not describe an NF4 matrix"),
        ({"shape": [48, 180]}, r"a\.weight has the shape \[8640, 1\], expected \[4320, 1\]"),
        ({"blocksize": 0}, "does not describe an NF4 matrix"),
        ({"nested_offset": None}, "does not describe an NF4 matrix"),
        ({"nested_blocksize": 128}, r"nested_absmax has the shape \[2\], expected \[3\]"),
    ],
)
def test_arrays_that_contradict_each_other_are_refused(
    changes: dict[str, Any], message: str, golden: dict[str, np.ndarray], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        Weights(write_file(tmp_path, golden, **changes))
