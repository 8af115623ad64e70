"""Reads single fields of records, nested fields such as `a.b.c`, and templates that join several fields."""

from __future__ import annotations

import string
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

MISSING: Final = object()
"""The value of a missing field."""


def get_field(record: Mapping[str, object], name: str) -> Any:
    """Returns the field with this name, or the nested field for a name such as `a.b.c`; MISSING if there is none."""
    if name in record:
        return record[name]
    value: object = record
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return MISSING
        value = value[key]
    return value


def is_template(text_key: str) -> bool:
    """Returns True for a template such as `{title}: {body}`, and False for the name of a field."""
    return "{" in text_key or "}" in text_key


@lru_cache(maxsize=64)
def parse_template(template: str) -> tuple[tuple[str, str | None], ...]:
    """Splits a template into pairs of a text and the field that follows it. The last field may be None.

    Raises:
        ValueError: if the template is invalid or has no field.
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
def field_names(text_key: str) -> tuple[str, ...]:
    """Returns the names of the fields that the text of a record uses."""
    if not is_template(text_key):
        return (text_key,)
    return tuple(dict.fromkeys(name for _, name in parse_template(text_key) if name))


def record_text(record: Mapping[str, object], text_key: str) -> Any:
    """Returns the text of a record with all fields of `field_names`. If a field is not a string, returns its value.

    If all fields are empty, so is the text, even if the template contains other text.
    """
    if not is_template(text_key):
        return get_field(record, text_key)
    values = {name: get_field(record, name) for name in field_names(text_key)}
    for value in values.values():
        if not isinstance(value, str):
            return value
    if not any(values.values()):
        return ""
    return "".join(text + (values[name] if name else "") for text, name in parse_template(text_key))
