"""The interface of a step, and what every kind of step is made from: a loss, a rule of update, an observer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import optax

from lm_trainer.core.batch import Batch
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
    """Something that looks at the inside of a step."""

    def before(self, state: TrainState) -> Any:
        """Takes what it needs of the state before the step, which the step consumes."""
        ...

    def after(self, before: Any, grads: Params, weight: jax.Array, state: TrainState) -> None:
        """`grads` are sums over the batch, and `weight` what to divide them by; the state is that after the step."""
        ...


@dataclass(frozen=True)
class UpdateRule:
    """The rule that turns a gradient into new weights."""

    optimizer: Optimizer
    tx: optax.GradientTransformationExtraArgs
    """Built from `optimizer` for the parameters that are trained."""
    averaging: AveragingConfig | None = None
    curvature: CurvatureFn | None = None
    """The estimate that the optimizer takes."""
    owned: bool = True
    """Each weight belongs to one device where the rule computes with whole weights, if it can; false: every device
    updates all of them."""


class Step(Protocol):
    """One optimizer step after another; what `determinism: elastic` and `fast` have in common.

    Calling it with a batch placed by `put` returns the next state and float32 scalars on the device (`loss`,
    `grad_norm`, `tokens` and others): reading them waits for the step. The state that it is given is consumed. A step
    whose loss or gradient is not finite leaves parameters and optimizer as they were.
    """

    plans: Piecewise[MicrobatchPlan]
    devices: DeviceGroups
    loops: bool
    """True if programs are called for each microbatch."""

    def prepare(self, batch: Batch, step: int = 0) -> None:
        """As `compile`; in a rehearsal (`lm_trainer.step.rehearse`) nothing is compiled."""
        ...

    def compile(self, batch: Batch, step: int = 0, *, observed: bool = False) -> Executable | Executables:
        """Compiles for rows like those of `batch` (any number of rows) and the batch size of `step`.

        With `observed` also what a step needs only for an observer. Returns the program that computes the gradient: of
        a microbatch, or where that is one program, of the step.
        """
        ...

    def compiled(self, step: int) -> bool:
        """Returns true if this step needs no compilation."""
        ...

    def local_rows(self, step: int = 0) -> Sequence[int]:
        """The rows of the global batch of `step` that this process needs."""
        ...

    def put(self, batch: Batch, step: int = 0) -> Any:
        """This process's rows of the global batch of `step` on their devices."""
        ...

    def gradient(self, state: TrainState, batch: Any) -> Sums:
        """The sums of the loss (and what it reports), the weights and the gradients over the global batch."""
        ...

    def __call__(
        self, state: TrainState, batch: Any, learning_rate: float, observer: Observer | None = None
    ) -> tuple[TrainState, Metrics]: ...
