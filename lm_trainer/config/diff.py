"""What differs between two configurations, or between one and the defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from lm_trainer.config.document import Path_, dotted
from lm_trainer.config.yaml_syntax import flow
from lm_trainer.core.config import Config


class Difference(NamedTuple):
    """One key with its two values, of which one may be absent."""

    key: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


_ABSENT = "(absent)"


def differences(old: Config, new: Config) -> list[Difference]:
    """The keys in which two configurations differ, in the order of `new`, values as YAML."""
    before, after = dict(_leaves(old.model_dump(mode="json"), ())), dict(_leaves(new.model_dump(mode="json"), ()))
    found = []
    for key in dict.fromkeys([*after, *before]):
        a, b = (flow(side[key]) if key in side else _ABSENT for side in (before, after))
        if a != b:
            found.append(Difference(dotted(key), a, b))
    return found


def defaults_like(config: Config) -> tuple[Config, list[Difference]]:
    """The defaults of a configuration's own kinds of model, optimizer and so on, and the kinds that differ.

    A block whose `type` is not the default one is compared with the defaults of its type: those of another type
    would differ in every key and say nothing.
    """
    plain = type(config)()
    try:
        same_types = type(config).model_validate(_types(config.model_dump(mode="json")))
    except ValidationError:
        return plain, []
    return same_types, [d for d in differences(plain, same_types) if d.key.rsplit(".", 1)[-1] == "type"]


def _types(value: Mapping[str, Any]) -> dict[str, Any]:
    """What is left of a configuration without all but the `type` of its blocks."""
    return {
        key: _types(item) if isinstance(item, Mapping) else item
        for key, item in value.items()
        if key == "type" or (isinstance(item, Mapping) and item)
    }


def _leaves(value: Any, path: Path_) -> Iterator[tuple[Path_, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value
