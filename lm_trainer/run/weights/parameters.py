"""Optimizer settings of each parameter, determined without data or accelerators."""

from __future__ import annotations

from lm_trainer.config.loader import LoadedConfig
from lm_trainer.core.errors import ConfigError, UserError
from lm_trainer.run.build.model import trace_model
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
