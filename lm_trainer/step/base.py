"""The interface of a step, and the parts shared by all kinds of steps: update rule and observer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import optax

from lm_trainer.core.batch import Batch
from lm_trainer.core.jax_types import PyTree
from lm_trainer.core.piecewise import Piecewise
from lm_trainer.optim import Optimizer
from lm_trainer.optim.averaging import AveragingConfig
from lm_trainer.step.dispatch.device_groups import DeviceGroups
from lm_trainer.step.dispatch.executable import Executable, Executables
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.loss.gradient import CurvatureFn, Sums
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.train_state import TrainState
from lm_trainer.step.updates.update import Metrics


class Observer(Protocol):
    """Looks at the inside of a step."""

    def before_step(self, state: TrainState) -> PyTree:
        """Copies the values it needs from the state before the step, which the step consumes."""
        ...

    def after_step(self, before: PyTree, grads: Params, weight: jax.Array, state: TrainState) -> None:
        """Receives the results of a step.

        Args:
            before: values returned by `before_step`.
            grads: gradients, summed over the batch.
            weight: the number to divide `grads` by.
            state: state after the step.
        """
        ...


@dataclass(frozen=True)
class UpdateRule:
    """The rule that turns a gradient into new weights."""

    optimizer: Optimizer
    tx: optax.GradientTransformationExtraArgs
    """Built from `optimizer` for the trained parameters."""
    averaging: AveragingConfig | None = None
    curvature: CurvatureFn | None = None
    """Curvature estimate for the optimizer."""
    owned: bool = True
    """True: if the rule needs unsharded weights, each weight is updated by one device (where the rule allows it).
    False: every device updates all of them."""


class Step(Protocol):
    """One optimizer step; the common interface of `determinism: elastic` and `fast`.

    A call with a batch placed by `put` returns the next state and float32 scalars on the device (`loss`, `grad_norm`,
    `tokens` and others); reading them waits for the step. The call consumes the given state. A step with a non-finite
    loss or gradient leaves parameters and optimizer unchanged.
    """

    plans: Piecewise[MicrobatchPlan]
    devices: DeviceGroups
    loops: bool
    """True if programs are called for each microbatch."""

    def prepare(self, batch: Batch, step: int = 0) -> None:
        """As `compile`; skipped in a rehearsal (`lm_trainer.step.rehearse`)."""
        ...

    def compile(self, batch: Batch, step: int = 0, *, observed: bool = False) -> Executable | Executables:
        """Compiles for rows of the same shape as in `batch` (in any number) and the batch size of `step`.

        With `observed`, also compiles the programs a step needs only for an observer. Returns the program that
        computes the gradient of a microbatch, or the program of the step if there is only one.
        """
        ...

    def is_compiled(self, step: int) -> bool:
        """True if this step needs no compilation."""
        ...

    def local_rows(self, step: int = 0) -> Sequence[int]:
        """Rows of the global batch of `step` that this process needs."""
        ...

    def put(self, batch: Batch, step: int = 0) -> PyTree:
        """Puts this process's rows of the global batch of `step` on their devices."""
        ...

    def gradient(self, state: TrainState, batch: PyTree) -> Sums:
        """Sums of loss, weights, gradients and reported metrics over the global batch."""
        ...

    def __call__(
        self, state: TrainState, batch: PyTree, learning_rate: float, observer: Observer | None = None
    ) -> tuple[TrainState, Metrics]: ...
