"""Keys that a run keeps from its first step on where the configuration does not set them, and what runs meant by them
before there were such keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from lm_trainer.core.config import Config

if TYPE_CHECKING:
    from lm_trainer.run.config.trainer_config import TrainerConfig

ConfigT = TypeVar("ConfigT", bound=Config)


def _before(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that are newer than some runs, with the values that compute the bits of a run whose record lacks them.

    Args:
        recorded: the trainer section of the run as it was written down.
    """
    # Read from a file, `determinism: layerwise` is `gather: layer` already.
    if recorded.get("determinism") == "layerwise" or recorded.get("gather") == "layer":
        return {"matrix_updates": "owned", "gather": "layer"}
    return {"matrix_updates": "repeated", "gather": "auto" if recorded.get("determinism") == "fast" else "model"}


_SPELT = {"layerwise": "elastic"}
"""Former values of `determinism`."""


def as_begun(trainer: TrainerConfig, recorded: Mapping[str, Any]) -> TrainerConfig:
    """The trainer section with which a run goes on: its newer keys are those of the record, unless they are set.

    Args:
        trainer: as it is configured now.
        recorded: the trainer section as it was written down; empty where there is no run yet.
    """
    if not recorded:
        return trainer
    values = {key: recorded.get(key, value) for key, value in _before(recorded).items()}
    if not trainer.bitwise:
        del values["gather"]
    return trainer.model_copy(update={k: v for k, v in values.items() if k not in trainer.model_fields_set})


def config_as_begun(config: ConfigT, recorded: Mapping[str, Any]) -> ConfigT:
    """A configuration with the trainer section of `as_begun`.

    Args:
        config: has a trainer section.
        recorded: the configuration as it was written down, or what of it decides numbers.
    """
    trainer: Any = getattr(config, "trainer")  # noqa: B009 - a section that not every `Config` has
    return config.model_copy(update={"trainer": as_begun(trainer, recorded.get("trainer") or {})})


def completed(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The numeric identity of a run, with the keys that its record lacks."""
    recorded = identity.get("trainer")
    if not isinstance(recorded, Mapping):
        return dict(identity)
    trainer = {**_before(recorded), **recorded}
    if trainer.get("determinism") in _SPELT:
        trainer["determinism"] = _SPELT[trainer["determinism"]]
    return {**identity, "trainer": trainer}


def without_newer_defaults(identity: Mapping[str, Any], trainer: TrainerConfig) -> dict[str, Any]:
    """The numeric identity of a configuration as it was before there were newer keys, where those have their defaults.

    Args:
        identity: of the configuration.
        trainer: its section.
    """
    recorded, fields = dict(identity["trainer"]), type(trainer).model_fields
    if trainer.gather == "layer":
        del recorded["gather"]
        recorded["determinism"] = "layerwise"
    for key in _before(recorded).keys() & recorded.keys():
        if getattr(trainer, key) == fields[key].default:
            del recorded[key]
    return {**identity, "trainer": recorded}


def in_present_spelling(trainer: Any) -> Any:
    """A trainer section as it is written, with `determinism: layerwise` as it is spelt now.

    Raises:
        ValueError: where `gather` says something else.
    """
    if not isinstance(trainer, Mapping) or trainer.get("determinism") not in _SPELT:
        return trainer
    if trainer.get("gather", "layer") != "layer":
        raise ValueError(
            f"determinism: layerwise is a former spelling of gather: layer, but gather is {trainer['gather']}; write "
            f"determinism: elastic"
        )
    return {**trainer, "determinism": _SPELT[trainer["determinism"]], "gather": "layer"}
