"""Trainer keys that keep the value they had at the first step of a run, unless the configuration sets them.

Runs that were recorded before such a key existed have an implied value for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from lm_trainer.core.config import Config
from lm_trainer.data.config import DataConfig
from lm_trainer.models import MODEL_CONFIGS, DecoderConfig
from lm_trainer.run.config.default_shards import MIN_MICROBATCHES, follows_from_batch, largest_shards
from lm_trainer.run.config.recorded_data_keys import (
    data_with_inferred_keys,
    data_with_recorded_keys,
    data_without_newer_defaults,
)

if TYPE_CHECKING:
    from lm_trainer.run.config.trainer_config import TrainerConfig

ConfigT = TypeVar("ConfigT", bound=Config)


def _infer_missing_keys(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keys that are newer than some recorded runs, with the values that reproduce the bits of these runs.

    Args:
        recorded: the recorded trainer section of the run.
    """
    # In a section read from a file, `determinism: layerwise` has already been replaced by `gather: layer`.
    if recorded.get("determinism") == "layerwise" or recorded.get("gather") == "layer":
        return {"matrix_updates": "owned", "gather": "layer"}
    return {"matrix_updates": "repeated", "gather": "auto" if recorded.get("determinism") == "fast" else "model"}


_ONLY_CHOICES = {"loss": {"type": "next_token"}, "parametrization": {"type": "standard"}}
"""Top-level sections of runs that were recorded before there was a choice."""
_NEWER_ADAPTER_KEYS = ("base_quantization",)
"""Keys of the adapter that are newer than some recorded runs; null is what these runs did."""
_NEWER_LOSS_KEYS = ("precompute",)
"""Keys of the loss that are newer than some recorded runs; false is what these runs did."""
_NEWER_OPTIMIZER_KEYS = ("qk_clip",)
"""Keys of the optimizer that are newer than some recorded runs; null is what these runs did."""
_CURRENT_SPELLING = {"layerwise": "elastic"}
"""Current values of `determinism`, by former value."""
_FAMILIES = {family.model_fields["type"].default: family for family in MODEL_CONFIGS}


def trainer_with_recorded_keys(trainer: TrainerConfig, recorded: Mapping[str, Any]) -> TrainerConfig:
    """Returns the trainer section with which a run continues. Newer keys that are not set get their recorded values.

    Args:
        trainer: the currently configured section.
        recorded: the recorded trainer section; empty for a new run.
    """
    if not recorded:
        return trainer
    values = {key: recorded.get(key, value) for key, value in _infer_missing_keys(recorded).items()}
    if not trainer.bitwise:
        del values["gather"]
    # Runs that were recorded before the default depended on the number of tokens have at most `MIN_MICROBATCHES`.
    if follows_from_batch(trainer) and "elastic_shards" in recorded:
        values["elastic_shards"] = largest_shards(trainer, recorded["elastic_shards"])
    return trainer.model_copy(update={k: v for k, v in values.items() if k not in trainer.model_fields_set})


def config_with_recorded_keys(config: ConfigT, recorded: Mapping[str, Any]) -> ConfigT:
    """Returns the configuration with which a run continues. Newer keys that are not set get their recorded values.

    Args:
        config: a configuration with a trainer section.
        recorded: the recorded configuration, or its numeric identity.
    """
    trainer: Any = getattr(config, "trainer")  # noqa: B009 - a section that not every `Config` has
    sections: dict[str, Config] = {"trainer": trainer_with_recorded_keys(trainer, recorded.get("trainer") or {})}
    data, recorded_data = getattr(config, "data", None), recorded.get("data")
    if isinstance(data, DataConfig) and isinstance(recorded_data, Mapping):
        sections["data"] = data_with_recorded_keys(data, recorded_data)
    model, recorded_model = getattr(config, "model", None), recorded.get("model")
    if isinstance(model, DecoderConfig) and isinstance(recorded_model, Mapping):
        sections["model"] = _model_with_recorded_keys(model, recorded_model)
    return config.model_copy(update=sections)


def _model_with_recorded_keys(model: DecoderConfig, recorded: Mapping[str, Any]) -> DecoderConfig:
    """Returns the model section with which a run continues. Newer keys that are not set get their recorded values."""
    if recorded.get("type") != getattr(model, "type", None):
        return model
    values = {key: recorded.get(key, value) for key, value in model.implied_settings.items()}
    return model.model_copy(update={k: v for k, v in values.items() if k not in model.model_fields_set})


def with_inferred_keys(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numeric identity of a run, and adds the keys that are missing in its record."""
    if isinstance(data := identity.get("data"), Mapping):
        identity = {**identity, "data": data_with_inferred_keys(data)}
    if isinstance(model := identity.get("model"), Mapping):
        identity = {**identity, "model": {**_implied_settings(model), **model}}
    recorded = identity.get("trainer")
    if not isinstance(recorded, Mapping):
        return dict(identity)
    trainer = {**_infer_missing_keys(recorded), **recorded}
    if trainer.get("determinism") in _CURRENT_SPELLING:
        trainer["determinism"] = _CURRENT_SPELLING[trainer["determinism"]]
    return {**identity, "trainer": trainer}


def _implied_settings(recorded: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the values of newer settings of the family of a recorded model section."""
    family = _FAMILIES.get(str(recorded.get("type")))
    return {} if family is None else family.implied_settings


def without_newer_defaults(identity: Mapping[str, Any], trainer: TrainerConfig, model: DecoderConfig) -> dict[str, Any]:
    """Returns a numeric identity without newer keys and newer defaults, as older versions would have recorded it.

    Args:
        identity: numeric identity of the configuration.
        trainer: trainer section of the configuration.
        model: model section of the configuration.
    """
    recorded, fields = dict(identity["trainer"]), type(trainer).model_fields
    if trainer.gather == "layer":
        del recorded["gather"]
        recorded["determinism"] = "layerwise"
    for key in _infer_missing_keys(recorded).keys() & recorded.keys():
        if getattr(trainer, key) == fields[key].default:
            del recorded[key]
    if follows_from_batch(trainer):
        recorded["elastic_shards"] = largest_shards(trainer, MIN_MICROBATCHES)
    sections = {key: value for key, value in identity.items() if _ONLY_CHOICES.get(key, ...) != value}
    if isinstance(data := identity.get("data"), Mapping):
        sections["data"] = data_without_newer_defaults(data)
    for name, keys in (("adapter", _NEWER_ADAPTER_KEYS), ("optimizer", _NEWER_OPTIMIZER_KEYS)):
        if isinstance(section := sections.get(name), Mapping):
            newer = {key for key in keys if section.get(key) is None}
            sections[name] = {key: value for key, value in section.items() if key not in newer}
    if isinstance(loss := sections.get("loss"), Mapping):
        sections["loss"] = {key: value for key, value in loss.items() if value or key not in _NEWER_LOSS_KEYS}
    if isinstance(recorded_model := sections.get("model"), Mapping):
        newer = {name for name in model.newer_fields if _is_as_in_older_runs(model, name)}
        sections["model"] = {key: value for key, value in recorded_model.items() if key not in newer}
    return {**sections, "trainer": recorded}


def _is_as_in_older_runs(model: DecoderConfig, name: str) -> bool:
    """Returns True if a newer setting has its default, or the value that older runs imply."""
    value = getattr(model, name)
    if name in model.implied_settings:
        return name not in model.model_fields_set or value == model.implied_settings[name]
    return value == type(model).model_fields[name].default


def replace_old_spelling(trainer: Any) -> Any:
    """Returns a trainer section with `determinism: layerwise` replaced by its current spelling.

    Raises:
        ValueError: if `gather` contradicts `layerwise`.
    """
    if not isinstance(trainer, Mapping) or trainer.get("determinism") not in _CURRENT_SPELLING:
        return trainer
    if trainer.get("gather", "layer") != "layer":
        raise ValueError(
            f"determinism: layerwise is a former spelling of gather: layer, but gather is {trainer['gather']}; write "
            f"determinism: elastic"
        )
    return {**trainer, "determinism": _CURRENT_SPELLING[trainer["determinism"]], "gather": "layer"}
