"""Several processes as one run: who writes, and how all of them decide alike."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_lead() -> bool:
    """Whether this process is the one that writes what exists once: process 0."""
    return jax.process_index() == 0


def any_process(flag: bool) -> bool:
    """Whether `flag` holds in any process of the run; all of them must ask at the same point."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def gather(values: np.ndarray) -> np.ndarray:
    """[processes, ...]: this array of every process, of the same shape in all of them."""
    if jax.process_count() == 1:
        return values[None]
    return np.asarray(multihost_utils.process_allgather(values))


def wait_for_all(what: str) -> None:
    """Returns when every process has come here; `what` names the place."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)
