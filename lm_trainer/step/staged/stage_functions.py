"""The functions of one stage of a loss on one microbatch, which a step compiles.

A loss is a list of stages: either the embedding, the layers and the head, or one stage with the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import numpy as np

from lm_trainer.core.jax_types import PyTree
from lm_trainer.step.loss.gradient import Sums

if TYPE_CHECKING:
    from jax.typing import DTypeLike

SCALAR = jax.ShapeDtypeStruct((), np.int32)


@dataclass(frozen=True)
class StageFunctions:
    """One stage, or several layers that share the same functions; each layer is then a stage.

    The functions take the parameters the stage reads, for a layer without the layer axis. `step`, `index` (of the
    microbatch) and `number` (of the layer) are int32 scalars. Arguments a stage does not have (the number of a
    layer, the input of the first stage, the derivative of the last) are None.
    """

    name: str
    reads: Mapping[str, DTypeLike]
    """Name of each parameter the stage reads -> dtype in which it is passed."""
    forward: Callable[..., tuple[PyTree, PyTree]] | None = None
    """`forward(params, stream, batch, number, step, index)`: the output of the stage, and residuals for `gradient`;
    None for the last stage."""
    gradient: Callable[..., tuple[PyTree, Sums]] | None = None
    """`gradient(params, stream, handed_on, batch, number, d_stream, step, index)`: the derivative of the loss for the
    input of the stage, and the sums with the gradients. They have a leading axis, over which the results of the batch
    shards are stacked. `handed_on` are the residuals. The sums of the last stage contain the loss and the metrics that
    it reports. None in evaluation."""
    losses: Callable[..., dict[str, jax.Array]] | None = None
    """The sums the loss reports, with the arguments of `forward`; None except for the last stage."""
    layers: range | None = None
    """Numbers of the layers; None if the stage is not a layer."""
    divided: bool = False
    """True if the functions themselves divide the microbatch among the devices of a group."""
