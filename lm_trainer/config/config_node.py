"""Nodes, which are positions in a configuration that are reached by walking down from its root."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, JsonValue

from lm_trainer.config.document import KeyPath
from lm_trainer.config.value_type import ValueType, type_tags, value_type_of, value_type_of_field

MAX_DEPTH = 8
"""Maximum depth of listed keys, since a recursive class has infinitely many keys."""


class NoSuchKey(LookupError):
    """A path does not lead to a declared key."""


@dataclass(frozen=True)
class ConfigNode:
    """A position in a configuration, with the values that are allowed there and the default."""

    value_type: ValueType
    default: object = None

    @classmethod
    def root(cls, model: type[BaseModel]) -> ConfigNode:
        return cls(ValueType("model", model, (model,)))

    @classmethod
    def undeclared_node(cls) -> ConfigNode:
        """Returns a node outside the declared keys."""
        return cls(ValueType("scalar"))

    def default_model(self) -> type[BaseModel] | None:
        """Returns the class of a block without `type`, which is the default's class or else the first of the union."""
        block = self.value_type.find_alternative("model")
        if block is None:
            return None
        return next((m for m in block.models if type(self.default) is m), block.models[0])

    def model_for(self, value: object) -> type[BaseModel] | None:
        """Returns the class that a value selects; None if its `type` is unknown or no block is allowed."""
        block = self.value_type.find_alternative("model")
        if block is None:
            return None
        if not isinstance(value, dict) or "type" not in value or not any(map(type_tags, block.models)):
            return self.default_model()
        return next((m for m in block.models if value["type"] in type_tags(m)), None)

    def candidate_models(self, value: object, *, all_classes: bool = False) -> tuple[type[BaseModel], ...]:
        """Returns the class that `value` selects, or all classes if it selects none or `all_classes` is True."""
        block = self.value_type.find_alternative("model")
        chosen = None if all_classes else self.model_for(value)
        return () if block is None else block.models if chosen is None else (chosen,)

    def child(self, value: object, key: str | int) -> ConfigNode:
        """Returns the node of `key` in `value`, which is the value of this node.

        Raises:
            NoSuchKey: if the key is not declared or the index is impossible.
        """
        return self._item_node(key) if isinstance(key, int) else self._key_node(value, key)

    def child_or_undeclared(self, value: object, key: str | int) -> ConfigNode:
        """Like `child`, but for walks over data that may have undeclared keys."""
        try:
            return self.child(value, key)
        except NoSuchKey:
            return ConfigNode.undeclared_node()

    def field_node(self, model: type[BaseModel], key: str) -> ConfigNode:
        """Returns the node of a field of a class."""
        info = model.model_fields[key]
        default = None if info.is_required() else info.get_default(call_default_factory=False)
        # The default of the block may differ from the defaults of its class.
        if type(self.default) is model:
            default = getattr(self.default, key)
        return ConfigNode(value_type_of_field(info), default)

    def _item_node(self, index: int) -> ConfigNode:
        items = self.value_type.find_alternative("list")
        if items is None:
            raise NoSuchKey("is not a list")
        # An item without `type` has the same class as a single block without `type`.
        default = None if isinstance(self.default, tuple | list) else self.default
        fixed = 0 <= index < len(items.items)
        return ConfigNode(value_type_of(items.items[index] if fixed else items.inner), default)

    def _key_node(self, value: object, key: str) -> ConfigNode:
        block, free = self.value_type.find_alternative("model"), self.value_type.find_alternative("mapping")
        if block is not None:
            model = self.model_for(value)
            if model is not None and key in model.model_fields:
                return self.field_node(model, key)
            if model is not None and model.model_config.get("extra") == "allow":
                return ConfigNode(ValueType("scalar", Any))
            if model is not None or free is None:
                raise NoSuchKey("unknown key")
        if free is not None:
            return ConfigNode(value_type_of(free.inner))
        if any(value_type.annotation is Any for value_type in self.value_type.alternatives_or_self()):
            return ConfigNode(ValueType("scalar", Any))
        raise NoSuchKey(
            "is a list; name an item by its number" if self.value_type.find_alternative("list") else "has no keys"
        )


def add_missing_types(node: ConfigNode, value: JsonValue) -> JsonValue:
    """Copies the data of a node, and adds missing `type` keys of union blocks, and `{}` for empty blocks.

    Later steps can then determine the class of a block from its `type`.
    """
    # An empty `optimizer:` is read as null, but means a block with all defaults.
    if value is None and node.default_model() and not node.value_type.nullable and not node.value_type.alternatives:
        value = {}
    if isinstance(value, list):
        return [add_missing_types(node.child_or_undeclared(value, index), item) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    default = node.default_model()
    if default is not None and "type" not in value and type_tags(default):
        value = {"type": type_tags(default)[0], **value}
    return {key: add_missing_types(node.child_or_undeclared(value, key), item) for key, item in value.items()}


def child_value(value: object, key: str | int) -> Any:
    """Returns the plain data at `key` in a block or list; None if it is missing."""
    if isinstance(value, dict):
        return value.get(key)
    return value[key] if isinstance(value, list) and isinstance(key, int) and 0 <= key < len(value) else None


def value_at(data: Any, path: KeyPath) -> Any:
    """Returns the plain data at a path, which must exist."""
    for key in path:
        data = data[key]
    return data


def all_keys(node: ConfigNode, value: object = None, *, all_classes: bool = False) -> list[str]:
    """Returns every dotted key allowed below a node with this value; with `all_classes`, for all classes of a union."""
    return list(dict.fromkeys(_iter_keys(node, value, "", all_classes, MAX_DEPTH)))


def _iter_keys(node: ConfigNode, value: object, prefix: str, all_classes: bool, depth: int) -> Iterator[str]:
    for model in node.candidate_models(value, all_classes=all_classes) if depth else ():
        for key in model.model_fields:
            below = value.get(key) if isinstance(value, dict) else None
            yield prefix + key
            yield from _iter_keys(node.field_node(model, key), below, f"{prefix}{key}.", all_classes, depth - 1)
