"""Foreign keys, which are keys of other frameworks' configurations. Known ones are renamed or dropped with a note.

Other foreign keys stay as they are, and are rejected as unknown keys with a reason.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from pydantic import BaseModel, JsonValue

from lm_trainer.config.config_node import ConfigNode, child_value
from lm_trainer.config.document import Document, KeyPath, Origin, dotted_key
from lm_trainer.core.config import Config

_NOT_READ = object()
"""Placeholder for the value of a key when an override sets something inside it."""


@dataclass(frozen=True)
class _RenamedKey:
    """A foreign key and the note about it, if any."""

    path: KeyPath
    origin: Origin | None
    note: str


def config_class_of(model: type[BaseModel] | None) -> type[Config]:
    """Returns the class with the lists of foreign keys of `model`; `Config`, whose lists are empty, if it has none."""
    return model if model is not None and issubclass(model, Config) else Config


def rename_foreign_keys(node: ConfigNode, data: object, path: KeyPath, document: Document) -> None:
    """Renames foreign keys in the data of a node to our keys, and adds notes to the document.

    Args:
        node: the node of the data.
        data: the data as written, which is modified in place.
        path: the path of the node. Positions below it move with their keys.
        document: the document with the positions, to which notes are added.
    """
    adopted = list(_rename_and_note(node, data, path, document))
    for note in dict.fromkeys(entry.note for entry in adopted if entry.note):
        first, *repeated = [entry for entry in adopted if entry.note == note]
        location = f"{first.origin.text}: {dotted_key(first.path)}" if first.origin else dotted_key(first.path)
        more = f" (and {len(repeated)} more)" if repeated else ""
        document.notes.append(f"{location}{more} {note}")


def translate_override(
    path: KeyPath, value: JsonValue, document: Document, root: type[BaseModel], shown: str
) -> tuple[KeyPath, JsonValue] | None:
    """Translates the path and value of an override to our keys.

    Args:
        path: the path as the user typed it.
        value: the value of the last key.
        document: the document with the data to override, to which notes are added.
        root: the class of the data.
        shown: the override as notes show it.

    Returns:
        The path and the value, which is `value` itself unless a key is respelt with another value. None for a dropped
            key.
    """
    node, data, our_path = ConfigNode.root(root), document.data, ()
    for depth, key in enumerate(path):
        model, key_value = node.model_for(data), value if depth == len(path) - 1 else _NOT_READ
        # The value of our key in the file does not matter, because the override replaces it.
        if respelt := _find_respelling(model, key, key_value, {}):
            if note := _old_spelling_note(model, key, key_value, respelt):
                document.notes.append(f"{shown}: {dotted_key(path[: depth + 1])} {note}")
            key, value = respelt
        elif (meaning := _find_meaning(model, key, key_value)) is not None:
            key, note = meaning
            if note:
                document.notes.append(f"{shown}: {dotted_key(path[: depth + 1])} {note}")
            if key is None:
                return None
        our_path = (*our_path, key)
        node, data = node.child_or_undeclared(data, key), child_value(data, key)
    return our_path, value


def sets_type(path: KeyPath, value: object, document: Document, root: type[BaseModel]) -> bool:
    """Returns True if an override sets the `type` of a block, with that key or with an equivalent foreign key."""
    *parent, key = path
    node, data = ConfigNode.root(root), document.data
    for step in parent:
        node, data = node.child_or_undeclared(data, step), child_value(data, step)
    respelt = _find_respelling(node.model_for(data), key, value, {})
    return (key if respelt is None else respelt[0]) == "type"


def _rename_and_note(node: ConfigNode, data: object, path: KeyPath, document: Document) -> Iterator[_RenamedKey]:
    if isinstance(data, list):
        for index, item in enumerate(data):
            yield from _rename_and_note(node.child_or_undeclared(data, index), item, (*path, index), document)
    if not isinstance(data, dict):
        return
    model = node.model_for(data)
    for key in list(data):
        if respelt := _find_respelling(model, key, data[key], data):
            yield _RenamedKey(
                (*path, key), document.key_origin((*path, key)), _old_spelling_note(model, key, data[key], respelt)
            )
            our_key, data[our_key] = respelt
            del data[key]
            document.move_positions((*path, key), (*path, our_key))
            continue
        meaning = _find_meaning(model, key, data[key])
        conflicting = meaning[0] if meaning and meaning[0] in data else None
        if meaning and conflicting is not None and conflicting in config_class_of(model).replaced_keys.get(key, ()):
            document.drop_positions((*path, conflicting))
            del data[conflicting]
            meaning = conflicting, f"{meaning[1]}, in the place of the {conflicting} beside it, which has no effect"
        # Two equivalent keys would hide one of the values, so the foreign key stays, and is rejected.
        if meaning is None or meaning[0] in data:
            continue
        our_key, note = meaning
        yield _RenamedKey((*path, key), document.key_origin((*path, key)), note)
        value = data.pop(key)
        if our_key is None:
            document.drop_positions((*path, key))
        else:
            data[our_key] = value
            document.move_positions((*path, key), (*path, our_key))
    for key, item in data.items():
        yield from _rename_and_note(node.child_or_undeclared(data, key), item, (*path, key), document)


def _find_respelling(
    model: type[BaseModel] | None, key: str | int, value: object, block: Container[str]
) -> tuple[str, JsonValue] | None:
    """Returns our key and value for a foreign key with this value; None if there is no such rule."""
    if not isinstance(key, str) or not isinstance(value, bool | int | str):
        return None
    rule = config_class_of(model).respelt_keys.get(key, {}).get(value)
    return None if rule is None or rule[0] in block else rule


def _old_spelling_note(
    model: type[BaseModel] | None, key: str | int, value: object, respelt: tuple[str, JsonValue]
) -> str:
    """Returns the note about an old spelling of a value of our key; empty for a foreign key."""
    return f"{value} is read as {respelt[0]}: {respelt[1]}" if key in config_class_of(model).model_fields else ""


def _find_meaning(model: type[BaseModel] | None, key: str | int, value: object) -> tuple[str | None, str] | None:
    """Returns our key (None if dropped) and a note for a foreign key that is accepted; None for other keys."""
    lists = config_class_of(model)
    if key in lists.model_fields or not isinstance(key, str):
        return None
    ignored, renamed = lists.ignored_keys.get(key), lists.renamed_keys.get(key)
    # An unset key has no effect.
    if value is None and (ignored or renamed or key in lists.refused_keys):
        return None, ""
    if renamed is not None:
        return renamed, f"is read as {renamed}"
    if ignored is not None and (ignored.values is None or value in ignored.values):
        return None, f"has no effect: {ignored.reason}"
    return None
