"""Places: positions in a configuration, found by walking down from its root."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from lm_trainer.config.shape import Shape, shape_of, shape_of_field, tags

MAX_DEPTH = 8
"""Levels of keys that are listed: a class that contains itself has endlessly many."""


class NoSuchKey(LookupError):
    """A path leads nowhere."""


@dataclass(frozen=True)
class ConfigNode:
    """A position in a configuration: the values that it allows, and the default if nothing is written there."""

    shape: Shape
    default: Any = None

    @classmethod
    def root(cls, model: type[BaseModel]) -> ConfigNode:
        return cls(Shape("model", model, (model,)))

    @classmethod
    def nowhere(cls) -> ConfigNode:
        """A place that no declared key leads to."""
        return cls(Shape("scalar"))

    def default_model(self) -> type[BaseModel] | None:
        """The class of a block without `type`: that of the default, else the first of the union."""
        block = self.shape.choice("model")
        if block is None:
            return None
        return next((m for m in block.models if type(self.default) is m), block.models[0])

    def model_for(self, value: Any) -> type[BaseModel] | None:
        """The class that a value selects; None for an unknown `type` and where no block can stand."""
        block = self.shape.choice("model")
        if block is None:
            return None
        if not isinstance(value, dict) or "type" not in value or not any(map(tags, block.models)):
            return self.default_model()
        return next((m for m in block.models if value["type"] in tags(m)), None)

    def models(self, value: Any, *, every: bool = False) -> tuple[type[BaseModel], ...]:
        """The class that `value` selects, or all if it selects none or `every` is wanted."""
        block = self.shape.choice("model")
        chosen = None if every else self.model_for(value)
        return () if block is None else block.models if chosen is None else (chosen,)

    def step(self, value: Any, key: str | int) -> ConfigNode:
        """The place of `key` in `value`, which stands here.

        Raises:
            NoSuchKey: if there is no such key or index here.
        """
        return self._item(key) if isinstance(key, int) else self._key(value, key)

    def step_or_nowhere(self, value: Any, key: str | int) -> ConfigNode:
        """As `step`, for walks over data that may have keys of any kind."""
        try:
            return self.step(value, key)
        except NoSuchKey:
            return ConfigNode.nowhere()

    def field(self, model: type[BaseModel], key: str) -> ConfigNode:
        """The place of a class's field."""
        info = model.model_fields[key]
        default = None if info.is_required() else info.get_default(call_default_factory=False)
        # The default of a block as a whole may differ from the defaults of its class.
        if type(self.default) is model:
            default = getattr(self.default, key)
        return ConfigNode(shape_of_field(info), default)

    def _item(self, index: int) -> ConfigNode:
        items = self.shape.choice("list")
        if items is None:
            raise NoSuchKey("is not a list")
        # An item without `type` is of the same class as one block without `type` in place of the list.
        default = None if isinstance(self.default, tuple | list) else self.default
        fixed = 0 <= index < len(items.items)
        return ConfigNode(shape_of(items.items[index] if fixed else items.inner), default)

    def _key(self, value: Any, key: str) -> ConfigNode:
        block, free = self.shape.choice("model"), self.shape.choice("mapping")
        if block is not None:
            model = self.model_for(value)
            if model is not None and key in model.model_fields:
                return self.field(model, key)
            if model is not None or free is None:
                raise NoSuchKey("unknown key")
        if free is not None:
            return ConfigNode(shape_of(free.inner))
        if any(shape.annotation is Any for shape in self.shape.choices()):
            return ConfigNode(Shape("scalar", Any))
        raise NoSuchKey("is a list; name an item by its number" if self.shape.choice("list") else "has no keys")


def complete(place: ConfigNode, value: Any) -> Any:
    """Copies the data at a place, with the `type` of every block of a union that has none, and `{}` for an empty block.

    Everything that reads the data afterwards finds the class of a block by its `type` alone.
    """
    # `optimizer:` with nothing below it is read as null, and means a block with all defaults.
    if value is None and place.default_model() and not place.shape.nullable and not place.shape.alternatives:
        value = {}
    if isinstance(value, list):
        return [complete(place.step_or_nowhere(value, index), item) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    default = place.default_model()
    if default is not None and "type" not in value and tags(default):
        value = {"type": tags(default)[0], **value}
    return {key: complete(place.step_or_nowhere(value, key), item) for key, item in value.items()}


def child(value: Any, key: str | int) -> Any:
    """The plain data at `key` in a block or list, None if there is nothing."""
    if isinstance(value, dict):
        return value.get(key)
    return value[key] if isinstance(value, list) and isinstance(key, int) and 0 <= key < len(value) else None


def all_keys(place: ConfigNode, value: Any = None, *, every: bool = False) -> list[str]:
    """Every dotted key that may be written below a place that holds `value`; of all classes of a union if `every`."""
    return list(dict.fromkeys(_keys(place, value, "", every, MAX_DEPTH)))


def _keys(place: ConfigNode, value: Any, prefix: str, every: bool, depth: int) -> Iterator[str]:
    for model in place.models(value, every=every) if depth else ():
        for key in model.model_fields:
            below = value.get(key) if isinstance(value, dict) else None
            yield prefix + key
            yield from _keys(place.field(model, key), below, f"{prefix}{key}.", every, depth - 1)
