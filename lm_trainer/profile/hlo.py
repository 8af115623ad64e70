"""Arrays as the text of a compiled program names them."""

from __future__ import annotations

import math
import re

ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
"""The dtype of an array, and its dimensions with commas between them."""


def array_bytes(dtype: str, dims: str) -> float:
    """The bytes of an array, from the two groups of `ARRAY`."""
    # A truth value takes a byte; the other names end in their bits, and 4-bit numbers share bytes.
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return math.prod(int(d) for d in dims.split(",") if d) * bits / 8
