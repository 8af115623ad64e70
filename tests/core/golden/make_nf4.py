"""Writes nf4.json: a matrix as bitsandbytes quantizes it and stores it in a file.

python -m venv bnb && bnb/bin/pip install torch bitsandbytes
bnb/bin/python tests/core/golden/make_nf4.py
"""

from __future__ import annotations

import base64
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 4
"""Number of rows of which the values after quantization are stored."""


def make_matrix() -> np.ndarray:
    """Returns a matrix of 270 blocks, so that scales have two groups, with an outlier and blocks of small numbers."""
    w_OI = (0.05 * np.random.default_rng(0).standard_normal((48, 360))).astype(np.float32)
    w_OI[3, 70] = 4.0
    w_OI[2, :128] *= 1e-3
    return w_OI


def main() -> None:
    """Quantizes the matrix as `load_in_4bit` with double quantization does."""
    import torch

    # Its own annotations contradict what it takes.
    bitsandbytes: Any = importlib.import_module("bitsandbytes")
    w_OI = torch.from_numpy(make_matrix())
    quantized = bitsandbytes.nn.Params4bit(
        w_OI.clone(), requires_grad=False, compress_statistics=True, quant_type="nf4", blocksize=64
    ).to("cpu")
    state = quantized.quant_state
    values = bitsandbytes.functional.dequantize_4bit(quantized.data, state)
    arrays = {"weight": quantized.data, "dequantized": values[:ROWS]}
    arrays |= {f"weight.{name}": x for name, x in state.as_dict(packed=True).items()}
    content = {name: pack(x) for name, x in arrays.items()}
    target = Path(__file__).with_name("nf4.json")
    target.write_text(json.dumps({"bitsandbytes": bitsandbytes.__version__, **content}, indent=1) + "\n")


def pack(x: Any) -> dict[str, Any]:
    """Returns dtype, shape and bytes of a tensor."""
    array = x.detach().contiguous().numpy()
    data = base64.b64encode(array.tobytes()).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}


if __name__ == "__main__":
    main()
