"""Finds differences between two configurations, or between a configuration and the defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pydantic import ValidationError

from lm_trainer.config.document import KeyPath, dotted_key
from lm_trainer.config.yaml_syntax import to_flow_yaml
from lm_trainer.core.config import Config
from lm_trainer.core.credentials import without_credentials


class Difference(NamedTuple):
    """A key with its old and new values, either of which may be absent."""

    key: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


_ABSENT = "(absent)"


def differences(old: Config, new: Config) -> list[Difference]:
    """Lists the keys in which two configurations differ, in the order of `new`, with values as YAML.

    Credentials are blanked, so they never differ.
    """
    dumped = (without_credentials(config.model_dump(mode="json")) for config in (old, new))
    old_values, new_values = (dict(_iter_leaves(plain, ())) for plain in dumped)
    changes = []
    for key in dict.fromkeys([*new_values, *old_values]):
        a, b = (to_flow_yaml(side[key]) if key in side else _ABSENT for side in (old_values, new_values))
        if a != b:
            changes.append(Difference(dotted_key(key), a, b))
    return changes


def differences_from_defaults(config: Config) -> list[Difference]:
    """Lists the keys in which a configuration differs from the defaults.

    A block with a non-default `type` is compared with the defaults of that type. Otherwise, every key would differ.
    """
    plain = type(config)()
    values = config.model_dump(mode="json")
    try:
        same_types = type(config).model_validate(_block_types(values))
    except ValidationError:  # a type that has keys without a default
        return differences(plain, config)
    # First the non-default types, and then all other keys compared with the defaults of these types.
    types = [d for d in differences(plain, same_types) if d.key.rsplit(".", 1)[-1] == "type"]
    order = {dotted_key(path): number for number, (path, _) in enumerate(_iter_leaves(values, ()))}
    return sorted([*types, *differences(same_types, config)], key=lambda d: order.get(d.key, len(order)))


def _block_types(value: Mapping[str, object]) -> dict[str, object]:
    """Returns only the `type` of each block of a configuration."""
    return {
        key: _block_types(item) if isinstance(item, Mapping) else item
        for key, item in value.items()
        if key == "type" or (isinstance(item, Mapping) and item)
    }


def _iter_leaves(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, object]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _iter_leaves(item, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _iter_leaves(item, (*path, index))
    else:
        yield path, value
