"""Base of optimizers whose matrices keep the norm that they start with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.params import Params

if TYPE_CHECKING:
    import optax


class ConstantNormConfig(OptimizerConfig):
    """Replaces the weight decay of the matrices of hidden layers by a constant norm (`lm_trainer.optim.hyperball`).

    Weight decay and training bring the norm of a matrix to a value that depends on both. A constant norm sets the angle
    of a step by the learning rate alone. Other parameters decay as usual.
    """

    def rule(self, params: Params) -> optax.GradientTransformationExtraArgs:
        import optax

        from lm_trainer.optim.hyperball import keep_norms

        return optax.chain(super().rule(params), keep_norms(params))

    def transfer_problem(self) -> str | None:
        return "its matrices keep their norms, and no published rule for learning rates is built in for that"

    def decay_mask(self, params: Params) -> dict[str, bool]:
        mask = super().decay_mask(params)
        return {name: decays and params[name].role != "matrix" for name, decays in mask.items()}
