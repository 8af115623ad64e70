"""Rates of the products of a linear layer and of the head in float32 and bfloat16 on a CPU, in JAX and PyTorch.

    python -m benchmarks.bfloat16_products

XLA multiplies bfloat16 on a CPU only if no operand is transposed; otherwise it converts both to float32 first. The last
column has the dtype of the operands in the compiled program with float32 results. The kinds run in turn.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks.peers.shapes import SHAPES
from benchmarks.setting import describe_load, describe_setting, markdown_table
from lm_trainer.core.runtime import available_cores, configure_jax
from lm_trainer.profile.timing import measure_interleaved, time_call

Array = TypeVar("Array", jax.Array, torch.Tensor)

TOKENS = 1024
SECONDS = 0.1
"""Least time of one measurement of one kind, which repeats the product."""


@dataclass(frozen=True)
class Product:
    """A product of two matrices, of which one may be transposed first."""

    name: str
    left: tuple[int, int]
    right: tuple[int, int]
    transposes_left: bool = False
    transposes_right: bool = False

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.left) * self.right[0 if self.transposes_right else 1]

    def transpose(self, left: Array, right: Array) -> tuple[Array, Array]:
        """Returns the operands [M, K] and [K, N] of the product, as views."""
        return left.T if self.transposes_left else left, right.T if self.transposes_right else right


def list_products() -> list[Product]:
    """Lists the products of the first layer of an MLP and of the head, at the shape `30m`, for 1024 tokens."""
    shape = SHAPES["30m"]
    width, hidden, vocab = shape.width, 4 * shape.width, shape.vocab
    return [
        Product("layer: result", (TOKENS, width), (width, hidden)),
        Product("layer: gradient of the input", (TOKENS, hidden), (width, hidden), transposes_right=True),
        Product("layer: gradient of the weight", (TOKENS, width), (TOKENS, hidden), transposes_left=True),
        Product("head: logits", (TOKENS, width), (vocab, width), transposes_right=True),
        Product("head: gradient of the input", (TOKENS, vocab), (vocab, width)),
        Product("head: gradient of the weight", (TOKENS, vocab), (TOKENS, width), transposes_left=True),
    ]


def compile_product(product: Product, dtype: jnp.dtype, result: jnp.dtype) -> tuple[Callable[[], object], str]:
    """Returns a function that computes the product, and the dtype of the operands in its program."""
    left, right = (jnp.asarray(x, dtype) for x in random_operands(product))

    def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.matmul(*product.transpose(x, y), preferred_element_type=result)

    program = jax.jit(multiply).lower(left, right).compile()
    return lambda: jax.block_until_ready(program(left, right)), operand_dtype(program.as_text() or "")


def operand_dtype(hlo: str) -> str:
    """Returns the dtype of the first operand of the only product in a program."""
    ((operand,),) = (re.findall(r"\(([\w%.-]+),", line) for line in hlo.splitlines() if " dot(" in line)
    name = re.escape(operand.removeprefix("%"))
    dtypes = re.findall(rf"%?{name}(?: =|:) (\w+)\[", hlo)
    return dtypes[-1]


def torch_product(product: Product, dtype: torch.dtype) -> Callable[[], object]:
    left, right = product.transpose(*(torch.tensor(x).to(dtype) for x in random_operands(product)))
    return lambda: left @ right


def random_operands(product: Product) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal(product.left, np.float32), rng.standard_normal(product.right, np.float32)


def measure_rates(product: Product, kinds: Sequence[Callable[[], object]], turns: int) -> list[float]:
    """Returns the median rate of each kind in GFLOP/s. The kinds take turns."""
    seconds = measure_interleaved({str(index): repeated(compute) for index, compute in enumerate(kinds)}, turns)
    return [product.flops / statistics.median(times) / 1e9 for times in seconds.values()]


def repeated(compute: Callable[[], object]) -> Callable[[], float]:
    """Returns a function that measures the mean time of a product in seconds, over at least `SECONDS`."""
    compute()
    count = 1 + int(SECONDS / time_call(compute))

    def repeat() -> None:
        # Drops each result, because arrays in fresh memory would slow down the products.
        for _ in range(count):
            compute()

    return lambda: time_call(repeat) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--turns", type=int, default=7)
    turns = parser.parse_args().turns
    configure_jax({}, None)
    torch.set_num_threads(available_cores())
    float32, bfloat16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
    rows = []
    for product in list_products():
        compiled = [compile_product(product, *dtypes) for dtypes in ((float32, float32), (bfloat16, bfloat16))]
        compiled.append(compile_product(product, bfloat16, float32))
        in_torch = [torch_product(product, dtype) for dtype in (torch.float32, torch.bfloat16)]
        rates = measure_rates(product, [*(compute for compute, _ in compiled), *in_torch], turns)
        rows.append([product.name, *(f"{rate:.0f}" for rate in rates), compiled[-1][1]])
    heads = ["GFLOP/s", "JAX float32", "bfloat16", "bfloat16, float32 results"]
    heads += ["PyTorch float32", "bfloat16", "multiplied as"]
    print("# Products of bfloat16\n")
    print(describe_setting("jax", "torch"), f"{TOKENS} tokens; {turns} turns.", describe_load())
    print(f"\n{markdown_table(heads, rows)}")


if __name__ == "__main__":
    main()
