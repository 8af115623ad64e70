"""Shapes: the values that an annotation of a configuration class allows."""

from __future__ import annotations

import collections.abc
import re
import types
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Discriminator
from pydantic.fields import FieldInfo

_UNIONS = (Union, types.UnionType)
_LISTS = (list, tuple, set, frozenset, collections.abc.Sequence)
_MAPPINGS = (dict, collections.abc.Mapping)


@dataclass(frozen=True)
class Shape:
    """One way to fill a place, or several (`alternatives`)."""

    kind: Literal["model", "list", "mapping", "scalar", "union"]
    annotation: Any = None
    models: tuple[type[BaseModel], ...] = ()
    """The classes of a block; more than one are told apart by `type`."""
    inner: Any = None
    """The annotation of a list's items or of a free mapping's values."""
    items: tuple[Any, ...] = ()
    """The annotations of a list of fixed length, one for each item."""
    has_names: bool = False
    """The keys of a free mapping are a kind of name of their own (`Name`), not any text."""
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
        # A validator of a union member wraps its name, as in `function-after[_check_phases(), tuple[IntPhase, ...]]`.
        core = label
        while wrapped := re.fullmatch(r"function-\w+\[[^,]*, (.*)\]", core):
            core = wrapped[1]
        head = core.split("[", 1)[0]
        return next((shape for shape in self.alternatives if shape.is_called(head)), Shape("scalar"))

    def is_called(self, name: str) -> bool:
        """Returns True if pydantic may mean this shape by the name of a union member; scalars have many names."""
        if self.kind == "model":
            return name in ("tagged-union", "union", *(model.__name__ for model in self.models))
        if self.kind == "list":
            return name in ("list", "tuple", "set", "frozenset")
        return self.kind == "mapping" and name == "dict"

    def may_hold_secrets(self) -> bool:
        """Returns True unless the keys of a block that stands here are names of sets, axes and the like."""
        free = self.choice("mapping")
        values = shape_of(free.inner).choices() if free else ()
        return not free or not (free.has_names or all(v.annotation not in (str, Any) for v in values))

    def is_number(self) -> bool:
        """Returns True if nothing but a number may stand here."""
        return all(shape.annotation in (int, float) for shape in self.choices())

    def takes_as_text(self, value: Any) -> bool:
        """Returns True if text may stand here, but nothing like `value`."""
        if isinstance(value, dict | list):
            return all(shape.annotation is str for shape in self.choices())
        scalars = [shape.annotation for shape in self.choices() if shape.kind == "scalar"]
        return bool(scalars) and all(a is str for a in scalars)


def shape_of_field(field: FieldInfo) -> Shape:
    """The shape of a class's field."""
    # pydantic keeps the discriminator of a field beside its annotation.
    return _tagged_union(field.annotation) if field.discriminator else shape_of(field.annotation)


def shape_of(annotation: Any) -> Shape:
    """The shape of an annotation."""
    if is_model(annotation):
        return Shape("model", annotation, (annotation,))
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _tagged_union(arguments[0]) if _has_discriminator(arguments[1:]) else shape_of(arguments[0])
    if origin in _UNIONS:
        return _union(annotation)
    container = origin or annotation
    if container in _LISTS:
        fixed = arguments if container is tuple and Ellipsis not in arguments else ()
        return Shape("list", annotation, inner=arguments[0] if arguments else Any, items=fixed)
    if container in _MAPPINGS:
        names = bool(arguments) and arguments[0] is not str
        return Shape("mapping", annotation, inner=arguments[1] if arguments else Any, has_names=names)
    return Shape("scalar", annotation)


def is_model(annotation: Any) -> bool:
    """Returns True for a class of a block."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def tags(model: type[BaseModel]) -> tuple[str, ...]:
    """The values of `type` that select a class; () for a class without `type`."""
    field = model.model_fields.get("type")
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()


def _has_discriminator(metadata: tuple[Any, ...]) -> bool:
    return any(isinstance(m, Discriminator) or getattr(m, "discriminator", None) for m in metadata)


def _union(annotation: Any) -> Shape:
    """The shape of a union whose members pydantic tries in turn."""
    members, nullable = _members(annotation)
    shapes = tuple(map(shape_of, members))
    one = shapes[0] if len(shapes) == 1 else Shape("union", annotation, alternatives=shapes)
    return replace(one, nullable=one.nullable or nullable)


def _tagged_union(annotation: Any) -> Shape:
    """The shape of a union that is told apart by `type`; it may have one member alone."""
    members, nullable = _members(annotation) if get_origin(annotation) in _UNIONS else ((annotation,), False)
    models = tuple(model for member in members for model in shape_of(member).models)
    return Shape("model", annotation, models, nullable=nullable, tagged=True)


def _members(union: Any) -> tuple[tuple[Any, ...], bool]:
    """The members of a union but for None, and whether None is one of them."""
    members = tuple(member for member in get_args(union) if member is not type(None))
    return members, len(members) < len(get_args(union))
