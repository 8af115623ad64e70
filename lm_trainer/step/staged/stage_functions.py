"""The functions of a stage of a loss, for one microbatch: what a step compiles.

A loss is a list of stages: the embedding, layers and the head, or one stage, the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from lm_trainer.step.loss.gradient import Sums

SCALAR = jax.ShapeDtypeStruct((), np.int32)


@dataclass(frozen=True)
class StageFunctions:
    """One stage, or several layers that share their functions, each a stage.

    The functions take the parameters that the stage reads, of a layer without the axis over layers. `step`, `index` (of
    the microbatch) and `number` (of the layer) are int32 scalars. A stage that has no number, no stream before it or no
    derivative after it is given None.
    """

    name: str
    reads: Mapping[str, Any]
    """Name of each parameter that it reads -> the dtype in which it is given."""
    forward: Callable[..., tuple[Any, Any]] | None = None
    """`forward(params, stream, batch, number, step, index)`: the stream after the stage, and values that are handed on
    to `gradient`; None of the last one."""
    gradient: Callable[..., tuple[Any, Sums]] | None = None
    """`gradient(params, stream, handed_on, batch, number, d_stream, step, index)`: the derivative of the loss for the
    stream before the stage, and the sums with the gradients. These have an axis in front, that of the batch shards once
    the groups' results are put together. The last stage has the loss and what it reports among the sums. None
    in evaluation."""
    losses: Callable[..., dict[str, jax.Array]] | None = None
    """With the arguments of `forward`: the sums that the loss reports; None of all but the last one."""
    layers: range | None = None
    """The numbers of the layers; None for what is no layer."""
    divided: bool = False
    """True where the functions themselves divide the microbatch among the devices of a group."""
