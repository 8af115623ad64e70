"""Keys of formats that keep the value they had at the first step of a run, unless the configuration sets them.

Runs that were recorded before such a key existed have an implied value for it. See `recorded_keys` for the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lm_trainer.data.config import SINGLE_SET, DataConfig
from lm_trainer.data.formats import AnyFormat, ChatFormat, SupervisedFormat
from lm_trainer.data.formats.too_long import ConversationFormat

_FORMATS: dict[str, type[ConversationFormat]] = {"chat": ChatFormat, "supervised": SupervisedFormat}
_IMPLIED = {"on_too_long": "split"}
"""Values with which older runs were computed, where they differ from the current default."""
_NEWER_KEYS = ("on_too_long", "last_turn_only", "turn_mask_field")


def data_with_recorded_keys(data: DataConfig, recorded: Mapping[str, Any]) -> DataConfig:
    """Returns the data section with which a run continues. Newer keys that are not set get their recorded values.

    Args:
        data: the currently configured section.
        recorded: the recorded data section of the run.
    """
    updates: dict[str, AnyFormat] = {}
    former_sets = recorded.get("configs") or {SINGLE_SET: recorded}
    for name, set_config in data.sets.items():
        format, former = set_config.format, (former_sets.get(name) or {}).get("format") or {}
        if not isinstance(format, ConversationFormat) or former.get("type") != format.type:
            continue
        values = {key: former.get(key, value) for key, value in _IMPLIED.items()}
        updates[name] = format.model_copy(update={k: v for k, v in values.items() if k not in format.model_fields_set})
    if not updates:
        return data
    if not data.configs:
        return data.model_copy(update={"format": updates[SINGLE_SET]})
    configs = {
        name: set_config.model_copy(update={"format": updates.get(name, set_config.format)})
        for name, set_config in data.configs.items()
    }
    return data.model_copy(update={"configs": configs})


def data_with_inferred_keys(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a recorded data section, and adds the keys that are missing in its record."""
    return _change_formats(data, lambda format: {**_IMPLIED, **format})


def data_without_newer_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a data section without newer keys that have their default, as older versions would have recorded it."""
    older = {key: value for key, value in data.items() if (key, value) != ("without", None)}
    return _change_formats(older, _without_newer_defaults)


def _without_newer_defaults(format: dict[str, Any]) -> dict[str, Any]:
    fields = _FORMATS[format["type"]].model_fields
    newer = [key for key in _NEWER_KEYS if key in format and key in fields and format[key] == fields[key].default]
    return {key: value for key, value in format.items() if key not in newer}


def _change_formats(data: Mapping[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Returns a data section in which `change` has replaced the formats of conversations."""

    def with_changed_format(section: dict[str, Any]) -> dict[str, Any]:
        format = section.get("format")
        if not isinstance(format, dict) or format.get("type") not in _FORMATS:
            return section
        return {**section, "format": change(format)}

    section = with_changed_format(dict(data))
    if isinstance(sets := data.get("configs"), dict):
        section["configs"] = {name: with_changed_format(set_section) for name, set_section in sets.items()}
    return section
