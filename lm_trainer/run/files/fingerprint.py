"""The fingerprint of a run: a few digits that prove its losses and its weights.

It depends on nothing but numbers: not on devices, processes or sharding, nor on which steps have checkpoints.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping

_DIGITS = 16


def extend_chain(chain: str, step: int, loss: float, grad_norm: float) -> str:
    """The chain over all steps so far, from the chain before this step ("" at the start) and what it computed.

    Args:
        chain: of the steps before.
        step: steps done, this one included.
        loss: a float32 value; every NaN counts as the same.
        grad_norm: likewise.
    """
    # NaN has many bit patterns, and which one comes out differs between processors.
    bits = b"".join(b"nan " if math.isnan(x) else struct.pack("<f", x) for x in (loss, grad_norm))
    return _digest(chain.encode() + struct.pack("<q", step) + bits)


def fingerprint(chain: str, hashes: Mapping[str, str]) -> str:
    """The fingerprint of the losses and gradient norms of all steps so far and of the parameters after the last one.

    Args:
        chain: as `extend_chain` made it of every step.
        hashes: of each parameter by name, as `lm_trainer.checkpoint.digest.hashes` makes them.
    """
    lines = [chain, *(f"{name} {hashes[name]}" for name in sorted(hashes))]
    return _digest("\n".join(lines).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]
