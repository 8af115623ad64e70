"""Programs of several emulated devices, one after the other."""

from __future__ import annotations

from typing import TypeVar

import jax

T = TypeVar("T")


def wait_on_cpu(results: T) -> T:
    """The results of a program, on emulated CPU devices once they are computed.

    There, XLA runs each device's part of a program in a thread of one pool. Several programs with collectives under
    way can each hold threads that the others wait for, and the process ends after 40 s ("Termination timeout for
    all gather RendezvousKey"; jax 0.10 and 0.11, two cores, from four devices on). On cards nothing is waited for.
    """
    first = next((x for x in jax.tree.leaves(results) if isinstance(x, jax.Array)), None)
    if first is None or len(first.sharding.device_set) == 1 or next(iter(first.devices())).platform != "cpu":
        return results
    return jax.block_until_ready(results)
