"""Settings of the optimizer by parameter; found without data or accelerators."""

from __future__ import annotations

from lm_trainer.config.loader import Loaded
from lm_trainer.core.errors import ConfigError, UserError
from lm_trainer.run.build.model import trace_model
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.weights.pretrained import resolve_model

_ANY_VOCABULARY = 256


def weight_decay(loaded: Loaded[RunConfig]) -> dict[str, bool]:
    """Parameter name -> whether it decays.

    Raises:
        ConfigError: when a pattern in `optimizer.weight_decay_modules` matches no parameter.
    """
    config = resolve_model(loaded.config, "run")
    # The names do not depend on the size of the vocabulary, which is known only once the tokenizer is read.
    model = trace_model(config, _ANY_VOCABULARY)
    try:
        return config.optimizer.decay_mask(model.optimizer_params())
    except UserError as error:
        raise ConfigError([f"{loaded.origin('optimizer.weight_decay_modules')}: {error}"]) from None
