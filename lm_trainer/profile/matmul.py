"""FLOP/s of a simple matrix product on this machine: a practical peak to which a training step can be compared.

Shape letters: N rows and columns of the square operands.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

_CPU_SIZE, _ACCELERATOR_SIZE = 2048, 8192
_CPU_PRODUCTS, _ACCELERATOR_PRODUCTS = 2, 16
"""Chains on accelerators are long, so that the measurement excludes the time to enqueue them."""


class MatmulProbe:
    """A chain of square matrix products, which runs concurrently on all given devices.

    Devices that share hardware, such as emulated CPU devices, therefore share its peak.

    Args:
        devices: devices of one kind.
        dtype: dtype of operands and results, with JAX's default precision (on NVIDIA GPUs, float32 is computed in
            TF32).
        size: N; by default 2048 on a CPU and 8192 on an accelerator.
        products: number of products in a chain.
    """

    def __init__(
        self,
        devices: Sequence[jax.Device],  # pyright: ignore[reportInvalidTypeForm]
        dtype: str | np.dtype,
        *,
        size: int | None = None,
        products: int | None = None,
    ):
        cpu = devices[0].platform == "cpu"
        self.dtype = jnp.dtype(dtype)
        self.size = size or (_CPU_SIZE if cpu else _ACCELERATOR_SIZE)
        self.products = products or (_CPU_PRODUCTS if cpu else _ACCELERATOR_PRODUCTS)
        # N^3 multiply-adds per product.
        self.flops = 2.0 * self.size**3 * self.products * len(devices)
        """Number of FLOPs of one `run`, over all devices."""
        generator = np.random.default_rng(0)
        # Keeps the variance at 1 along the chain, because zeros and overflows would change the power draw.
        x_NN = generator.standard_normal((self.size, self.size), np.float32)
        w_NN = generator.standard_normal((self.size, self.size), np.float32) / np.sqrt(self.size)
        self._operands = [jax.device_put((x_NN.astype(self.dtype), w_NN.astype(self.dtype)), d) for d in devices]
        self._chain = jax.jit(functools.partial(_chain, products=self.products))
        self.run()

    def run(self) -> float:
        """Returns the time in seconds of one chain on every device, from the first call to the last result."""
        started = time.perf_counter()
        # Starts all devices before waiting for any of them.
        results = [self._chain(*operands) for operands in self._operands]
        jax.block_until_ready(results)
        return time.perf_counter() - started


def _chain(x_NN: jax.Array, w_NN: jax.Array, *, products: int) -> jax.Array:
    for _ in range(products):
        x_NN = x_NN @ w_NN
    return x_NN
