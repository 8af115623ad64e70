"""Agreement among the processes of a run: the one that writes, flags and values of all of them, a barrier."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_lead() -> bool:
    """Tells whether this process is the one that writes files of which a run has one: process 0."""
    return jax.process_index() == 0


def any_process(flag: bool) -> bool:
    """Tells whether `flag` holds in any process of the run.

    It waits for all processes, and hangs unless all of them ask at the same point.
    """
    # A run of one process asks after every step, and must not wait for its devices there.
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def gather(values: np.ndarray) -> np.ndarray:
    """Returns [processes, ...]: this array of every process, of the same shape in all of them. Waits for all."""
    if jax.process_count() == 1:
        return values[None]
    # Of numbers of 64 bits JAX would keep the lower half.
    sent = values.reshape(-1).view(np.uint32) if values.dtype.itemsize == 8 else values
    found = np.ascontiguousarray(multihost_utils.process_allgather(sent))
    return found.view(values.dtype).reshape(len(found), *values.shape)


def gather_texts(text: str) -> list[str]:
    """Returns this text of every process, in their order. Waits for all."""
    if jax.process_count() == 1:
        return [text]
    content = np.frombuffer(text.encode(), np.uint8)
    longest = int(gather(np.asarray(len(content), np.int32)).max())
    padded = np.zeros(longest, np.uint8)
    padded[: len(content)] = content
    return [row.tobytes().rstrip(b"\0").decode() for row in gather(padded)]


def wait_for_all(what: str) -> None:
    """Returns when every process has come here; processes that wait with another `what` make all of them fail."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)
