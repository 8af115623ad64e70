"""Parameters that are set from measurements of the forward pass, and not by the optimizer."""

from __future__ import annotations

from flax import nnx


class MeasuredParam(nnx.Param):
    """A float32 parameter whose gradient is a measurement of the microbatch, independent of the loss.

    Like all gradients, the measurements of the microbatches of a step are combined into one of the global batch. No
    optimizer updates the parameter.
    """
