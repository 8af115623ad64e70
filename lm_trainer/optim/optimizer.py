"""An optimizer as a training step asks for it, whoever wrote its update rule."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Literal

from lm_trainer.core.config import Config
from lm_trainer.core.piecewise import TokenSchedule
from lm_trainer.optim.params import Params
from lm_trainer.optim.schedule import Schedule

if TYPE_CHECKING:
    import jax
    import optax


class Optimizer(Config):
    """The update rule of a run, and what a step must know of it."""

    @property
    @abstractmethod
    def elementwise(self) -> bool:
        """True if the update of each number follows from its own gradient and state and given scalars alone.

        Only then does every device update its own shard of the state: a sum over a shard would have other bits on
        another mesh. Otherwise each weight of each layer belongs to one device, which updates it whole in a program
        that is the same on every mesh, or, where `build_one` returns None, every device computes the whole update.
        """

    @property
    def skips_steps(self) -> bool:
        """True if the rule itself leaves out bad steps, and keeps in its state what it must remember of them."""
        return False

    @property
    def curvature(self) -> Literal["hutchinson", "gauss_newton_bartlett"] | None:
        """The estimate of the loss's curvature that `update` takes as its keyword argument `curvature`; None: none."""
        return None

    @property
    def curvature_interval(self) -> int:
        """Steps from one estimate to the next; between them `curvature` is None."""
        return 1

    @abstractmethod
    def schedule(self, num_train_steps: int, tokens: TokenSchedule | None = None) -> Schedule | None:
        """Returns the learning rate as a function of the step, from 0; None where the rule keeps its own.

        Args:
            num_train_steps: steps of the run.
            tokens: the tokens of each step.
        """

    @abstractmethod
    def build(self, params: Params) -> optax.GradientTransformationExtraArgs:
        """Returns the update rule for these parameters, on flat dicts of arrays by the same names.

        Its `update` takes the keyword arguments `learning_rate` (0 where `schedule` is None), `grad_norm` (the global
        norm of the gradient) and `loss`, float32 scalars that are computed once, outside of it, so that no device
        computes them differently. A rule that skips steps takes `weight` as well, the sum of the batch's weights. It
        ignores others. Arrays of its state that are like a parameter stand in dicts under
        the parameter's name.

        Raises:
            UserError: when a setting names no parameter.
        """

    def build_one(self, name: str, params: Params) -> optax.GradientTransformationExtraArgs | None:
        """Returns the rule of `build` for one parameter alone; None where updates of several depend on one another.

        Where the first axis of the parameter counts layers, the rule is for one of them, without that axis.

        Args:
            name: of the parameter.
            params: all that are trained.
        """
        del name, params
        return None

    def metrics(self, opt_state: Any) -> dict[str, jax.Array]:
        """Reads the scalars for the log from the state that `update` returned; meant to be called under `jit`."""
        del opt_state
        return {}

    def eval_params(self, params: Any, opt_state: Any) -> Any:
        """Returns the weights to evaluate and to export, from the trained ones and the optimizer's state."""
        del opt_state
        return params
