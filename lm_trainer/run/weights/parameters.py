"""Optimizer settings of each parameter, determined without data or accelerators."""

from __future__ import annotations

from lm_trainer.config.loader import LoadedConfig
from lm_trainer.core.errors import ConfigError, UserError
from lm_trainer.optim import Multipliers
from lm_trainer.run.build.model import trace_model
from lm_trainer.run.build.transfer import find_transfer
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.weights.pretrained import resolve_model

_ANY_VOCABULARY = 256


def weight_decay_mask(loaded: LoadedConfig[RunConfig]) -> dict[str, bool]:
    """Returns a mapping from parameter name to True if weight decay applies to the parameter.

    Raises:
        ConfigError: if a pattern in `optimizer.weight_decay_modules` matches no parameter.
    """
    config = resolve_model(loaded.config, "run")
    # The parameter names do not depend on the vocabulary size, which is unknown before the tokenizer is read.
    model = trace_model(config, _ANY_VOCABULARY)
    try:
        return config.optimizer.decay_mask(model.optimizer_params())
    except UserError as error:
        raise ConfigError([f"{loaded.origin('optimizer.weight_decay_modules')}: {error}"]) from None


def multiplier_table(loaded: LoadedConfig[RunConfig]) -> list[str]:
    """Returns lines with the factors that `parametrization` gives the settings of each parameter, and its name.

    Raises:
        UserError: as for `find_transfer`.
    """
    config = resolve_model(loaded.config, "run")
    transfer = find_transfer(config, _ANY_VOCABULARY)
    lines = [f"{'initial':>10} {'rate':>10} {'epsilon':>10} {'decay':>10}  parameter"]
    for name in trace_model(config, _ANY_VOCABULARY).optimizer_params():
        values = transfer.multipliers.get(name, Multipliers())
        initial = transfer.initial[name].total if name in transfer.initial else 1.0
        factors = initial, values.rate, values.epsilon, 1 / values.rate
        lines.append(f"{' '.join(f'{factor:>10.4g}' for factor in factors)}  {name}")
    return lines
