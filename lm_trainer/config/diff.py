"""Differences between two configurations, or between one and the defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from lm_trainer.config.document import KeyPath, dotted
from lm_trainer.config.yaml_syntax import flow
from lm_trainer.core.config import Config
from lm_trainer.core.credentials import without_credentials


class Difference(NamedTuple):
    """One key with its two values, of which one may be absent."""

    key: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


_ABSENT = "(absent)"


def differences(old: Config, new: Config) -> list[Difference]:
    """Lists the keys in which two configurations differ, in the order of `new`, values as YAML.

    Credentials are blanked, and so make no difference.
    """
    dumped = (without_credentials(config.model_dump(mode="json")) for config in (old, new))
    before, after = (dict(_leaves(plain, ())) for plain in dumped)
    found = []
    for key in dict.fromkeys([*after, *before]):
        a, b = (flow(side[key]) if key in side else _ABSENT for side in (before, after))
        if a != b:
            found.append(Difference(dotted(key), a, b))
    return found


def differences_from_defaults(config: Config) -> list[Difference]:
    """Lists the keys in which a configuration differs from the defaults.

    A block whose `type` is not the default one is compared with the defaults of its own type: those of another type
    would differ in every key and say nothing.
    """
    plain = type(config)()
    values = config.model_dump(mode="json")
    try:
        same_types = type(config).model_validate(_types(values))
    except ValidationError:  # a type that has keys without default
        return differences(plain, config)
    # The types that are not the default ones, and the rest against the defaults of those types.
    types = [d for d in differences(plain, same_types) if d.key.rsplit(".", 1)[-1] == "type"]
    order = {dotted(path): number for number, (path, _) in enumerate(_leaves(values, ()))}
    return sorted([*types, *differences(same_types, config)], key=lambda d: order.get(d.key, len(order)))


def _types(value: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration reduced to the `type` of each of its blocks."""
    return {
        key: _types(item) if isinstance(item, Mapping) else item
        for key, item in value.items()
        if key == "type" or (isinstance(item, Mapping) and item)
    }


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value
