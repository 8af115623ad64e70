"""The queue of layers that the host has dispatched and the devices have not yet computed."""

from __future__ import annotations

from collections import deque

import jax

from lm_trainer.core.jax_types import PyTree
from lm_trainer.step.dispatch.microbatches import Microbatches


class LayerQueue:
    """Prevents the host from running more than a few layers ahead of the devices.

    Args:
        layers_at_once: number of layers in the queue, including the one being computed.
    """

    def __init__(self, layers_at_once: int) -> None:
        self._layers_at_once = layers_at_once
        self._waiting: deque[list[PyTree]] = deque()

    def push(self, results: Microbatches[PyTree]) -> None:
        """Adds the results of a layer, and waits until the devices have finished an earlier layer."""
        # Waiting for one array of each group is enough; other arrays may have been donated.
        self._waiting.append(results.last_values())
        if len(self._waiting) == self._layers_at_once:
            jax.block_until_ready(self._waiting.popleft())
