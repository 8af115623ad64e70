"""Functions of one stage of a loss on one microbatch, which a step compiles.

A loss is a list of stages: either embedding, layers and head, possibly after the embedding and layers of an encoder or
of a frozen model; or a single stage with the whole model.
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
    """One stage, or several layers that share the same functions. In the latter case, each layer is a stage.

    The functions take the parameters that the stage reads; parameters of a layer lack the layer axis. `step`, `index`
    (of the microbatch) and `number` (of the layer) are int32 scalars. Arguments that a stage does not have are None:
    the number if it is not a layer, the input of the first stage, the derivative of the last stage.
    """

    name: str
    reads: Mapping[str, DTypeLike]
    """Name of each parameter that the stage reads -> dtype in which it is passed."""
    gradient_reads: Mapping[str, DTypeLike] | None = None
    """The same for `gradient`, which may need the values of fewer parameters than have a gradient; None: as `reads`."""
    forward: Callable[..., tuple[PyTree, PyTree]] | None = None
    """`forward(params, stream, batch, number, step, index)` returns the output of the stage, and residuals for
    `gradient`; None for the last stage."""
    gradient: Callable[..., tuple[PyTree, Sums]] | None = None
    """`gradient(params, stream, handed_on, batch, number, d_stream, step, index)` returns the derivative of the loss
    with respect to the input of the stage, and the sums with the gradients. These have a leading axis, along which the
    results of the batch shards are stacked. `handed_on` are the residuals. The sums of the last stage contain the loss
    and the metrics that it reports. None in evaluation."""
    losses: Callable[..., dict[str, jax.Array]] | None = None
    """Returns the sums that the loss reports, with the arguments of `forward`; None except for the last stage."""
    layers: range | None = None
    """Numbers of the layers; None if the stage is not a layer."""
    divided: bool = False
    """True if the functions themselves divide the microbatch among the devices of a group."""
    shares_input: bool = False
    """True if the input contains arrays that other stages read too, such as the output of an encoder. Programs must not
    reuse their memory, and `forward` returns None for them."""

    def row_of(self, number: jax.Array) -> jax.Array:
        """Returns the row of layer `number` in the stacked parameters, an int32 scalar."""
        assert self.layers is not None
        row = number // self.layers.step
        skipped = self.layers.start // self.layers.step
        return row - skipped if skipped else row
