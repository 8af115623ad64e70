"""Bytes per second of a simple copy on this machine, which is the limit of memory-bound operations.

Shape letters: N elements.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp

_CPU_BYTES, _ACCELERATOR_BYTES = 256 << 20, 2 << 30
"""Larger than the caches, from which data would be copied faster than from memory."""


class CopyProbe:
    """Reads an array and writes another array of the same size, on one device.

    Args:
        device: the device to measure.
        num_bytes: size of the array in bytes; by default 256 MiB on a CPU, which is more than its caches hold, and 2
            GiB on an accelerator.
    """

    def __init__(self, device: jax.Device, *, num_bytes: int | None = None):  # pyright: ignore[reportInvalidTypeForm]
        size = num_bytes or (_CPU_BYTES if device.platform == "cpu" else _ACCELERATOR_BYTES)
        self._x_N = jax.device_put(jnp.ones(size // 4, jnp.float32), device)
        # Each result overwrites the previous one, because otherwise the page faults of fresh memory would be measured.
        # The previous result is not read; otherwise XLA would have to copy it first.
        self._copy = jax.jit(lambda x_N, _old_N, shift: x_N + shift, donate_argnums=1, keep_unused=True)
        # Both arrays exist before the first run, which compiles and is not timed.
        self._y_N = jnp.copy(self._x_N)
        self.num_bytes = 2.0 * self._x_N.nbytes
        """Number of bytes that one `run` reads and writes."""
        self.run()

    def run(self) -> float:
        """Returns the duration of one copy in seconds."""
        started = time.perf_counter()
        self._y_N = jax.block_until_ready(self._copy(self._x_N, self._y_N, 0.0))
        return time.perf_counter() - started

    def compile(self) -> Any:
        """Returns the program of one `run`, a `jax.stages.Compiled`."""
        return self._copy.lower(self._x_N, self._y_N, 0.0).compile()
