"""Fields of records: one by its name, one inside of others as `a.b.c`, several joined by a template."""

from __future__ import annotations

import string
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

MISSING: Final = object()
"""Stands for a field that a record does not have."""


def lookup(record: Mapping[str, Any], name: str) -> Any:
    """Returns the field of this name, or else the one that `a.b.c` leads to; MISSING where there is none."""
    if name in record:
        return record[name]
    value: Any = record
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return MISSING
        value = value[key]
    return value


def is_template(text_key: str) -> bool:
    """Tells a template, such as `{title}: {body}`, from the name of a field."""
    return "{" in text_key or "}" in text_key


@lru_cache(maxsize=64)
def template_parts(template: str) -> tuple[tuple[str, str | None], ...]:
    """Cuts a template into (text, the field after it); the field of the last may be None.

    Raises:
        ValueError: if it names no field, or is no template.
    """
    parts = []
    for text, name, spec, conversion in string.Formatter().parse(template):
        if name == "" or spec or conversion:
            raise ValueError(
                f"{template!r} holds a brace without the name of a field; write {{name}}, and {{{{ for a brace"
            )
        parts.append((text, name))
    if not any(name for _, name in parts):
        raise ValueError(f"{template!r} names no field; write {{name}} where its text belongs")
    return tuple(parts)


@lru_cache(maxsize=64)
def names_of(text_key: str) -> tuple[str, ...]:
    """Names the fields that the text of a record is made of."""
    if not is_template(text_key):
        return (text_key,)
    return tuple(dict.fromkeys(name for _, name in template_parts(text_key) if name))


def text_of(record: Mapping[str, Any], text_key: str) -> Any:
    """Returns the text of a record that has all fields of `names_of`; the value as it is, where one is no string.

    A record whose fields are all empty has an empty text, whatever else stands in the template.
    """
    if not is_template(text_key):
        return lookup(record, text_key)
    values = {name: lookup(record, name) for name in names_of(text_key)}
    for value in values.values():
        if not isinstance(value, str):
            return value
    if not any(values.values()):
        return ""
    return "".join(text + (values[name] if name else "") for text, name in template_parts(text_key))
