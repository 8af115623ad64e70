"""Synchronisation of programs on several emulated CPU devices."""

from __future__ import annotations

from typing import TypeVar

import jax

T = TypeVar("T")


def wait_on_cpu(results: T) -> T:
    """Returns the results of a program; on several emulated CPU devices it first waits until they are computed.

    XLA runs the part of each emulated device in a thread of one pool. If several programs with collectives are in
    flight, each can hold threads that the others wait for, and XLA ends the process after 40 s ("Termination timeout
    for all gather RendezvousKey"; jax 0.10 and 0.11, two cores, four or more devices). Accelerators queue programs in
    order, so no wait is needed.
    """
    first = next((x for x in jax.tree.leaves(results) if isinstance(x, jax.Array)), None)
    # Checking one array is enough: all results of a program are on the same devices.
    if first is None or len(first.sharding.device_set) == 1 or next(iter(first.devices())).platform != "cpu":
        return results
    return jax.block_until_ready(results)
