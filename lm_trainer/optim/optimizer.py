"""Interface between an optimizer and a training step."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Literal, Self

from lm_trainer.core.config import Config
from lm_trainer.core.jax_types import PyTree
from lm_trainer.core.piecewise import TokenSchedule
from lm_trainer.optim.params import Params
from lm_trainer.optim.schedule import Schedule

if TYPE_CHECKING:
    import jax
    import optax


Curvature = Literal["hutchinson", "gauss_newton_bartlett"]
"""Estimator of the curvature of the loss: see `lm_trainer.nn.curvature`."""


class Optimizer(Config):
    """The update rule of a run, and the properties of the rule that a step needs to know."""

    @property
    @abstractmethod
    def elementwise(self) -> bool:
        """True if the update of each element depends only on its own gradient and state and on scalars.

        Only then does every device update its own shard of the state, because the bits of a sum over a shard would
        depend on the mesh. Otherwise each layer of each weight is assigned to one device, which updates it unsharded in
        a program that is the same on every mesh. If `build_one` returns None, every device computes the full update.
        """

    @property
    def skips_steps(self) -> bool:
        """True if the rule itself skips bad steps, based on a history in its state."""
        return False

    @property
    def logit_limit(self) -> float | None:
        """Largest attention logit of a head whose weights an update leaves as they are; None: of all heads."""
        return None

    def without_logit_limit(self) -> Self:
        """Returns the same rule without `logit_limit`."""
        return self

    @property
    def curvature(self) -> Curvature | None:
        """The curvature estimate that `update` takes as the keyword argument `curvature`; None if it takes none."""
        return None

    @property
    def curvature_interval(self) -> int:
        """Number of steps from one estimate to the next; in the steps between, `curvature` is None."""
        return 1

    @abstractmethod
    def schedule(self, num_train_steps: int, tokens: TokenSchedule | None = None) -> Schedule | None:
        """Returns the learning rate as a function of the step, counted from 0; None if the rule has its own learning
        rate.

        Args:
            num_train_steps: number of steps of the run.
            tokens: number of tokens of each step.
        """

    @abstractmethod
    def build(self, params: Params) -> optax.GradientTransformationExtraArgs:
        """Returns the update rule for these parameters, which works on flat dicts of arrays by parameter name.

        Its `update` takes the keyword arguments `learning_rate` (0 if `schedule` is None), `grad_norm` (the global norm
        of the gradient) and `loss`. They are float32 scalars, computed once outside the rule, so that all devices use
        the same values. A rule that skips steps also takes `weight`, the sum of the weights of the batch. Other
        arguments are ignored. Arrays of the state in the shape of a parameter are in dicts by parameter name.

        Raises:
            UserError: if a setting matches no parameter.
        """

    def build_one(self, name: str, params: Params) -> optax.GradientTransformationExtraArgs | None:
        """Returns the rule of `build` for a single parameter; None if updates of several parameters depend on one
        another.

        If the first axis of the parameter is the layer axis, the rule is for one layer, without this axis.

        Args:
            name: name of the parameter.
            params: all trained parameters.
        """
        del name, params
        return None

    def metrics(self, opt_state: optax.OptState) -> dict[str, jax.Array]:
        """Reads scalars to log from the state returned by `update`. Must be called under `jit`."""
        del opt_state
        return {}

    def eval_params(self, params: PyTree, opt_state: optax.OptState) -> PyTree:
        """Returns the weights to evaluate and export, computed from the trained weights and the optimizer state."""
        del opt_state
        return params
