"""What may stand at a place of a configuration, taken from the annotations of its classes."""

from __future__ import annotations

import collections.abc
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Discriminator
from pydantic.fields import FieldInfo

_LISTS = (list, tuple, set, frozenset, collections.abc.Sequence)
_MAPPINGS = (dict, collections.abc.Mapping)
MAX_DEPTH = 8
"""Levels of keys that are listed: a class that contains itself has endlessly many."""


@dataclass(frozen=True)
class Shape:
    """One way to fill a place, or several (`alternatives`)."""

    kind: Literal["model", "list", "mapping", "scalar", "union"]
    annotation: Any = None
    models: tuple[type[BaseModel], ...] = ()
    """The classes of a block; more than one are told apart by `type`."""
    inner: Any = None
    """The annotation of a list's items or of a free mapping's values."""
    alternatives: tuple[Shape, ...] = ()
    """In a union without `type`, which pydantic tries in turn."""
    nullable: bool = False
    tagged: bool = False

    def choices(self) -> tuple[Shape, ...]:
        return self.alternatives or (self,)

    def choice(self, kind: str) -> Shape | None:
        """The alternative of a kind, if there is one."""
        return next((shape for shape in self.choices() if shape.kind == kind), None)

    def branch(self, label: str) -> Shape:
        """The alternative that pydantic calls `label` in the location of an error."""
        core = label
        while wrapped := re.fullmatch(r"function-\w+\[[^,]*, (.*)\]", core):
            core = wrapped[1]
        head = core.split("[", 1)[0]
        for shape in self.alternatives:
            if shape.kind == "model" and (head in ("tagged-union", "union") or head in _names(shape)):
                return shape
            if shape.kind == "list" and head in ("list", "tuple", "set", "frozenset"):
                return shape
            if shape.kind == "mapping" and head == "dict":
                return shape
        return Shape("scalar")

    def is_number(self) -> bool:
        """Whether nothing but a number may stand here."""
        return all(shape.annotation in (int, float) for shape in self.choices())

    def takes_as_text(self, value: Any) -> bool:
        """Whether text may stand here, but nothing like `value`."""
        if isinstance(value, dict | list):
            return all(shape.annotation is str for shape in self.choices())
        scalars = [shape.annotation for shape in self.choices() if shape.kind == "scalar"]
        return bool(scalars) and all(a is str for a in scalars)


def _names(shape: Shape) -> list[str]:
    return [model.__name__ for model in shape.models]


def shape_of(annotation: Any) -> Shape:
    """Takes an annotation, or the description of a field, apart."""
    if isinstance(annotation, FieldInfo):
        return _block(annotation.annotation) if annotation.discriminator else shape_of(annotation.annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return Shape("model", annotation, (annotation,))
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        tagged = any(isinstance(m, Discriminator) or getattr(m, "discriminator", None) for m in arguments[1:])
        return _block(arguments[0]) if tagged else shape_of(arguments[0])
    if origin in (Union, types.UnionType):
        members = [a for a in arguments if a is not type(None)]
        shapes = [shape_of(member) for member in members]
        one = shapes[0] if len(shapes) == 1 else Shape("union", annotation, alternatives=tuple(shapes))
        return replace(one, nullable=one.nullable or len(members) < len(arguments))
    if (origin or annotation) in _LISTS:
        return Shape("list", annotation, inner=arguments[0] if arguments else Any)
    if (origin or annotation) in _MAPPINGS:
        return Shape("mapping", annotation, inner=arguments[1] if len(arguments) > 1 else Any)
    return Shape("scalar", annotation)


def _block(union: Any) -> Shape:
    """The shape of a union that is told apart by `type`."""
    members = get_args(union) if get_origin(union) in (Union, types.UnionType) else (union,)
    models = tuple(m for a in members if a is not type(None) for m in shape_of(a).models)
    return Shape("model", union, models, nullable=type(None) in members, tagged=True)


def tags(model: type[BaseModel]) -> tuple[str, ...]:
    """The values of `type` that select a class; () for a class without `type`."""
    field = model.model_fields.get("type")
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()


def child(value: Any, key: str | int) -> Any:
    """What stands at `key` in plain data, None if nothing does."""
    if isinstance(value, dict):
        return value.get(key)
    return value[key] if isinstance(value, list) and isinstance(key, int) and 0 <= key < len(value) else None


class NoSuchKey(LookupError):
    """A path leads nowhere; `model` is the class whose keys were meant, if it was one."""

    def __init__(self, reason: str, model: type[BaseModel] | None = None):
        super().__init__(reason)
        self.model = model


@dataclass(frozen=True)
class Place:
    """A position in a configuration: what may stand there and what does if nothing is written."""

    shape: Shape
    default: Any = None

    @classmethod
    def root(cls, model: type[BaseModel]) -> Place:
        return cls(Shape("model", model, (model,)))

    @classmethod
    def nowhere(cls) -> Place:
        """Where nothing that is known may stand."""
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

    def field(self, model: type[BaseModel], key: str) -> Place:
        """The place of a class's field."""
        info = model.model_fields[key]
        default = None if info.is_required() else info.get_default(call_default_factory=False)
        if type(self.default) is model:
            default = getattr(self.default, key)
        return Place(shape_of(info), default)

    def step(self, value: Any, key: str | int) -> Place:
        """The place of `key` in `value`, which stands here.

        Raises:
            NoSuchKey: if there is no such key or index here.
        """
        if isinstance(key, int):
            items = self.shape.choice("list")
            if items is None:
                raise NoSuchKey("is not a list")
            several = isinstance(self.default, tuple | list)
            default = next(iter(self.default), None) if several else self.default
            return Place(shape_of(items.inner), default)
        block, free = self.shape.choice("model"), self.shape.choice("mapping")
        if block is not None:
            model = self.model_for(value)
            if model is not None and key in model.model_fields:
                return self.field(model, key)
            if model is not None or free is None:
                raise NoSuchKey("unknown key", model)
        if free is not None:
            return Place(shape_of(free.inner))
        if any(shape.annotation is Any for shape in self.shape.choices()):
            return Place(Shape("scalar", Any))
        raise NoSuchKey("is a list; name an item by its number" if self.shape.choice("list") else "has no keys")

    def models(self, value: Any, *, every: bool = False) -> tuple[type[BaseModel], ...]:
        """The class that `value` selects, or all if it selects none or `every` is wanted."""
        block = self.shape.choice("model")
        chosen = None if every else self.model_for(value)
        return () if block is None else block.models if chosen is None else (chosen,)


def all_keys(place: Place, value: Any = None, *, every: bool = False) -> list[str]:
    """Every dotted key that may be written below a place that holds `value`; of all classes of a union if `every`."""
    return list(dict.fromkeys(_keys(place, value, "", every, MAX_DEPTH)))


def _keys(place: Place, value: Any, prefix: str, every: bool, depth: int) -> Iterator[str]:
    for model in place.models(value, every=every) if depth else ():
        for key in model.model_fields:
            below = value.get(key) if isinstance(value, dict) else None
            yield prefix + key
            yield from _keys(place.field(model, key), below, f"{prefix}{key}.", every, depth - 1)
