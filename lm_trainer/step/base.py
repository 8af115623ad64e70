"""Interface of a step, and the parts that all kinds of steps share: update rule and observer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import jax
import optax

from lm_trainer.core.batch import Batch
from lm_trainer.core.jax_types import PyTree
from lm_trainer.core.piecewise import Piecewise
from lm_trainer.optim import Optimizer
from lm_trainer.optim.averaging import AveragingConfig
from lm_trainer.step.check.cross_check import CrossCheck
from lm_trainer.step.dispatch.device_groups import DeviceGroups
from lm_trainer.step.dispatch.executable import Executable, Executables
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.loss.gradient import CurvatureFn, Sums
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.train_state import TrainState
from lm_trainer.step.updates.update import Metrics

Marker = Callable[[Literal["gathered", "computed"], Sequence[jax.Array]], None]
"""Receives arrays of a step once they are enqueued: gathered parameters, and results of the last microbatches."""


class Observer(Protocol):
    """Observes the values inside a step."""

    def before_step(self, state: TrainState) -> PyTree:
        """Copies the values that the observer needs from the state before the step, which the step consumes."""
        ...

    def after_step(self, before: PyTree, grads: Params, weight: jax.Array, state: TrainState) -> None:
        """Receives the results of a step.

        Args:
            before: the result of `before_step`.
            grads: gradients, summed over the batch.
            weight: number by which to divide `grads`.
            state: state after the step.
        """
        ...


@dataclass(frozen=True)
class UpdateRule:
    """Rule that turns a gradient into new weights."""

    optimizer: Optimizer
    tx: optax.GradientTransformationExtraArgs
    """Optimizer transformation, built from `optimizer` for the trained parameters."""
    averaging: AveragingConfig | None = None
    curvature: CurvatureFn | None = None
    """Function that estimates the curvature for the optimizer; None if the optimizer uses none."""
    owned: bool = True
    """Matters if the rule needs unsharded weights: True assigns each weight to one device, which updates it (where the
    rule allows it); False makes every device update all weights."""


class Step(Protocol):
    """An optimizer step; the common interface of `determinism: elastic` and `fast`.

    A call with a batch that was placed by `put` returns the next state and float32 scalars on the device (`loss`,
    `grad_norm`, `tokens` and others); reading the scalars waits for the step. The call consumes the given state. A step
    whose loss or gradient is not finite leaves parameters and optimizer unchanged.
    """

    plans: Piecewise[MicrobatchPlan]
    devices: DeviceGroups
    loops: bool
    """True if programs are called for each microbatch."""
    marker: Marker | None
    """Called in steps that gather the full model and then compute without other processes."""

    def prepare(self, batch: Batch, step: int = 0) -> None:
        """Same as `compile`, but does nothing in a rehearsal (`lm_trainer.step.rehearse`)."""
        ...

    def compile(self, batch: Batch, step: int = 0, *, observed: bool = False) -> Executable | Executables:
        """Compiles for rows of the same shape as in `batch`, in any number, and for the batch size of `step`.

        With `observed`, also compiles the programs that a step needs only for an observer. Returns the program that
        computes the gradient of a microbatch, or the program of the step if there is only one.
        """
        ...

    def is_compiled(self, step: int) -> bool:
        """Returns true if this step needs no compilation."""
        ...

    def local_rows(self, step: int = 0) -> Sequence[int]:
        """Returns the indices of the rows of the global batch of `step` that this process needs."""
        ...

    def put(self, batch: Batch, step: int = 0) -> PyTree:
        """Puts this process's rows of the global batch of `step` on their devices."""
        ...

    def gradient(self, state: TrainState, batch: PyTree) -> Sums:
        """Returns the sums of loss, weights, gradients and reported metrics over the global batch."""
        ...

    def __call__(
        self,
        state: TrainState,
        batch: PyTree,
        learning_rate: float,
        observer: Observer | None = None,
        check: CrossCheck | None = None,
    ) -> tuple[TrainState, Metrics]: ...
