"""The parametrization of a run as values for each parameter of its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
from flax import nnx

from lm_trainer.core.errors import UserError
from lm_trainer.models import DecoderConfig
from lm_trainer.nn.folded_factors import FoldedFactor, folded_factors
from lm_trainer.optim import Multipliers, Param
from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.multipliers import find_multipliers, initial_multiplier
from lm_trainer.run.config.parametrization import StandardConfig
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.step.state.model_def import ModelDef


class InitialValues(NamedTuple):
    """Change of the initial values of a parameter."""

    folded: FoldedFactor
    factor: float
    """Factor of initial values alone."""

    @property
    def total(self) -> float:
        """The product of both factors."""
        return self.folded.factor * self.factor


@dataclass(frozen=True)
class Transfer:
    """The parametrization of a run by dotted name of the parameter; empty if it is `standard`."""

    initial: Mapping[str, InitialValues] = field(default_factory=dict)
    multipliers: Mapping[str, Multipliers] = field(default_factory=dict)

    def scale_initial_values(self, model: nnx.Module) -> None:
        """Changes the initial values of a model that has just been built."""
        for path, variable in nnx.iter_graph(model):
            change = self.initial.get(".".join(map(str, path)))
            if isinstance(variable, nnx.Param) and change is not None and change.total != 1.0:
                variable.set_value(change.folded.scale(variable.get_value(), change.factor))


def find_transfer(config: RunConfig, vocab_size: int) -> Transfer:
    """Finds the values of all parameters of a run; no values if its parametrization is `standard`.

    Raises:
        UserError: if the base has other parameters than the model, or a decay does not fit a multiplier.
    """
    parametrization, optimizer = config.parametrization, config.optimizer
    if isinstance(parametrization, StandardConfig):
        return Transfer()
    assert isinstance(optimizer, OptimizerConfig)
    model = nnx.eval_shape(lambda: config.model.build(vocab_size, key=jax.random.key(0)))
    base = parametrization.base_model(config.model, num_layers=config.model.num_layers)
    params, base_params = _params(config.model, vocab_size), _params(base, vocab_size)
    if different := params.keys() ^ base_params.keys():
        raise UserError(f"parametrization.base: base and model have different parameters, such as {min(different)}")
    factors = parametrization.factors(config.model, vocab_size)
    folded, decays = folded_factors(model, factors), optimizer.decay_mask(params)
    initial, multipliers = {}, {}
    for name, param in params.items():
        fold, base_param = folded.get(name, FoldedFactor()), base_params[name]
        if fold.offset and fold.factor != 1.0 and decays[name]:
            raise UserError(
                f"optimizer.weight_decay_modules: {name} decays, which has no rule under parametrization: "
                f"{parametrization.type}, because the model adds {fold.offset:g} to it"
            )
        depth_std = factors.residual_std if fold.writes_residual and param.role == "matrix" else 1.0
        initial[name] = InitialValues(fold, initial_multiplier(param, base_param) * depth_std)
        multipliers[name] = find_multipliers(param, base_param, optimizer, depth=factors.depth, factor=fold.factor)
    return Transfer(initial, multipliers)


def _params(model: DecoderConfig, vocab_size: int) -> dict[str, Param]:
    return ModelDef.trace(lambda: model.build(vocab_size, key=jax.random.key(0))).optimizer_params()
