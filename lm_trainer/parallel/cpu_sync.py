"""Synchronization of programs that run on several emulated CPU devices."""

from __future__ import annotations

from typing import TypeVar

import jax

T = TypeVar("T")


def wait_on_cpu(results: T) -> T:
    """Returns the results of a program. On several emulated CPU devices, waits until they are computed.

    XLA runs the parts of all emulated devices in the threads of one pool. If several programs with collectives are in
    flight, each can occupy threads that the others wait for, and XLA ends the process after 40 s ("Termination timeout
    for all gather RendezvousKey"; jax 0.10 and 0.11, two cores, four or more devices). Accelerators run queued programs
    in order, so they need no wait.
    """
    first = next((x for x in jax.tree.leaves(results) if isinstance(x, jax.Array)), None)
    # It is enough to check one array, because all results of a program are on the same devices.
    if first is None or len(first.sharding.device_set) == 1 or next(iter(first.devices())).platform != "cpu":
        return results
    return jax.block_until_ready(results)
