"""Communication among the processes of a run: the lead process, shared flags and values, a barrier."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_lead() -> bool:
    """Returns true in process 0, which writes the files that exist once per run."""
    return jax.process_index() == 0


def any_process(flag: bool) -> bool:
    """Returns true if `flag` is true in any process of the run.

    Waits for all processes, and hangs unless all of them call it at the same point.
    """
    # A single-process run calls this after every step and must not wait for its devices.
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def gather(values: np.ndarray) -> np.ndarray:
    """Returns this array from every process, [processes, ...]; all must have the same shape. Waits for all."""
    if jax.process_count() == 1:
        return values[None]
    # JAX would keep only the lower half of 64-bit numbers.
    sent = values.reshape(-1).view(np.uint32) if values.dtype.itemsize == 8 else values
    received = np.ascontiguousarray(multihost_utils.process_allgather(sent))
    return received.view(values.dtype).reshape(len(received), *values.shape)


def gather_texts(text: str) -> list[str]:
    """Returns this text from every process, in process order. Waits for all of them."""
    if jax.process_count() == 1:
        return [text]
    content = np.frombuffer(text.encode(), np.uint8)
    longest = int(gather(np.asarray(len(content), np.int32)).max())
    padded = np.zeros(longest, np.uint8)
    padded[: len(content)] = content
    return [row.tobytes().rstrip(b"\0").decode() for row in gather(padded)]


def broadcast_bytes(content: bytes) -> bytes:
    """Returns the bytes of process 0 in every process. Waits for all of them."""
    if jax.process_count() == 1:
        return content
    size = int(gather(np.asarray(len(content), np.int64))[0])
    local = np.frombuffer(content, np.uint8) if is_lead() else np.zeros(size, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(local)).tobytes()


def wait_for_all(barrier: str) -> None:
    """Returns once every process has called it. Fails in all processes if they wait at different barriers."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(barrier)
