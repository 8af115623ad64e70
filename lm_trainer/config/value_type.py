"""Value types, which describe the values that an annotation of a configuration class allows."""

from __future__ import annotations

import collections.abc
import re
import types
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel, Discriminator
from pydantic.fields import FieldInfo

_UNIONS = (Union, types.UnionType)
_LISTS = (list, tuple, set, frozenset, collections.abc.Sequence)
_MAPPINGS = (dict, collections.abc.Mapping)


@dataclass(frozen=True)
class ValueType:
    """The kind of value that is allowed at a node, or several kinds (`alternatives`)."""

    kind: Literal["model", "list", "mapping", "scalar", "union"]
    annotation: object = None
    models: tuple[type[BaseModel], ...] = ()
    """The classes of a block. Several classes are distinguished by `type`."""
    inner: object = None
    """The annotation of a list's items or of a mapping's values."""
    items: tuple[object, ...] = ()
    """The annotations of the items of a fixed-length list."""
    has_names: bool = False
    """True if the keys of a mapping have a name type (`Name`), rather than being arbitrary text."""
    alternatives: tuple[ValueType, ...] = ()
    """The members of a union without `type`, which pydantic tries in order."""
    nullable: bool = False
    tagged: bool = False

    def alternatives_or_self(self) -> tuple[ValueType, ...]:
        return self.alternatives or (self,)

    def find_alternative(self, kind: str) -> ValueType | None:
        """Returns the alternative of a kind, or None."""
        return next((value_type for value_type in self.alternatives_or_self() if value_type.kind == kind), None)

    def alternative_for_label(self, label: str) -> ValueType:
        """Returns the alternative that pydantic names `label` in an error location."""
        # A validator of a union member wraps its name, as in `function-after[_check_phases(), tuple[IntPhase, ...]]`.
        core = label
        while wrapped := re.fullmatch(r"function-\w+\[[^,]*, (.*)\]", core):
            core = wrapped[1]
        head = core.split("[", 1)[0]
        return next((value_type for value_type in self.alternatives if value_type.is_called(head)), ValueType("scalar"))

    def is_called(self, name: str) -> bool:
        """Returns True if pydantic may use `name` for this value type in a union. Scalars have many names."""
        if self.kind == "model":
            return name in ("tagged-union", "union", *(model.__name__ for model in self.models))
        if self.kind == "list":
            return name in ("list", "tuple", "set", "frozenset")
        return self.kind == "mapping" and name == "dict"

    def may_hold_secrets(self) -> bool:
        """Returns True unless the keys of a block are names, for example of sets or axes."""
        free = self.find_alternative("mapping")
        values = value_type_of(free.inner).alternatives_or_self() if free else ()
        return not free or not (free.has_names or all(v.annotation not in (str, Any) for v in values))

    def is_number(self) -> bool:
        """Returns True if only numbers are allowed."""
        return all(value_type.annotation in (int, float) for value_type in self.alternatives_or_self())

    def takes_as_text(self, value: object) -> bool:
        """Returns True if text is allowed, but no value of the kind of `value`."""
        if isinstance(value, dict | list):
            return all(value_type.annotation is str for value_type in self.alternatives_or_self())
        scalars = [value_type.annotation for value_type in self.alternatives_or_self() if value_type.kind == "scalar"]
        return bool(scalars) and all(a is str for a in scalars)


def value_type_of_field(field: FieldInfo) -> ValueType:
    """Returns the value type of a field of a class."""
    # pydantic stores a field's discriminator separately from its annotation.
    return _tagged_union_value_type(field.annotation) if field.discriminator else value_type_of(field.annotation)


def value_type_of(annotation: object) -> ValueType:
    """Returns the value type of an annotation."""
    if is_model(annotation):
        return ValueType("model", annotation, (annotation,))
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return (
            _tagged_union_value_type(arguments[0]) if _has_discriminator(arguments[1:]) else value_type_of(arguments[0])
        )
    if origin in _UNIONS:
        return _union_value_type(annotation)
    container = origin or annotation
    if container in _LISTS:
        fixed = arguments if container is tuple and Ellipsis not in arguments else ()
        return ValueType("list", annotation, inner=arguments[0] if arguments else Any, items=fixed)
    if container in _MAPPINGS:
        names = bool(arguments) and arguments[0] is not str
        return ValueType("mapping", annotation, inner=arguments[1] if arguments else Any, has_names=names)
    return ValueType("scalar", annotation)


def is_model(annotation: object) -> TypeGuard[type[BaseModel]]:
    """Returns True if an annotation is the class of a block."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def type_tags(model: type[BaseModel]) -> tuple[str, ...]:
    """Returns the values of `type` that select a class; () if the class has no `type` field."""
    field = model.model_fields.get("type")
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()


def _has_discriminator(metadata: tuple[object, ...]) -> bool:
    return any(isinstance(m, Discriminator) or getattr(m, "discriminator", None) for m in metadata)


def _union_value_type(annotation: object) -> ValueType:
    """Returns the value type of a union whose members pydantic tries in order."""
    members, nullable = _union_members(annotation)
    value_types = tuple(map(value_type_of, members))
    one = value_types[0] if len(value_types) == 1 else ValueType("union", annotation, alternatives=value_types)
    return replace(one, nullable=one.nullable or nullable)


def _tagged_union_value_type(annotation: object) -> ValueType:
    """Returns the value type of a union discriminated by `type`, which may have only one member."""
    members, nullable = _union_members(annotation) if get_origin(annotation) in _UNIONS else ((annotation,), False)
    models = tuple(model for member in members for model in value_type_of(member).models)
    return ValueType("model", annotation, models, nullable=nullable, tagged=True)


def _union_members(union: object) -> tuple[tuple[object, ...], bool]:
    """Returns the members of a union except None, and True if None is a member."""
    members = tuple(member for member in get_args(union) if member is not type(None))
    return members, len(members) < len(get_args(union))
