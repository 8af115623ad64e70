"""The fingerprint of a run: a short hash of its losses and weights.

It depends only on numerical values, and not on the devices, the processes, the sharding or the steps at which
checkpoints were saved.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping

_DIGITS = 16


def extend_chain(chain: str, step: int, loss: float, grad_norm: float) -> str:
    """Returns the hash chain after appending one step.

    Args:
        chain: hash chain over the previous steps; the empty string at the start.
        step: number of completed steps, including this one.
        loss: loss of the step in float32; all NaN values are equivalent.
        grad_norm: gradient norm of the step in float32; all NaN values are equivalent.
    """
    # NaN has many bit patterns, and processors differ in the one that they produce.
    bits = b"".join(b"nan " if math.isnan(x) else struct.pack("<f", x) for x in (loss, grad_norm))
    return _digest(chain.encode() + struct.pack("<q", step) + bits)


def compute_fingerprint(chain: str, hashes: Mapping[str, str]) -> str:
    """Returns the fingerprint of the losses and gradient norms of all steps so far and of the current parameters.

    Args:
        chain: hash chain over all steps, from `extend_chain`.
        hashes: hash of each parameter by name, from `lm_trainer.checkpoint.digest.compute_hashes`.
    """
    lines = [chain, *(f"{name} {hashes[name]}" for name in sorted(hashes))]
    return _digest("\n".join(lines).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]
