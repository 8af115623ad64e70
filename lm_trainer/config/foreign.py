"""Foreign keys: those of other frameworks' configurations that are read as keys of ours, or dropped with a note.

What else is foreign stays, and is refused as an unknown key with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from lm_trainer.config.config_node import ConfigNode, child
from lm_trainer.config.document import Document, KeyPath, Origin, dotted
from lm_trainer.core.config import Config

_NOT_READ = object()
"""The value of a key of which only something inside it is set."""


@dataclass(frozen=True)
class _Found:
    """A foreign key and the note on it, if there is one."""

    path: KeyPath
    origin: Origin | None
    note: str


def lists_of(model: type[BaseModel] | None) -> type[Config]:
    """Returns the class whose lists of foreign keys hold for a block of `model`; `Config` (empty lists) for none."""
    return model if model is not None and issubclass(model, Config) else Config


def adopt(place: ConfigNode, data: Any, path: KeyPath, document: Document) -> None:
    """Rewrites the data at a place to the keys that there are here, and adds notes to the document.

    Args:
        place: of the data.
        data: as it was written; changed in place.
        path: the place's path; positions below it are moved with their keys.
        document: holds the positions, and takes the notes.
    """
    found = list(_adopt(place, data, path, document))
    for note in dict.fromkeys(one.note for one in found if one.note):
        first, *others = [one for one in found if one.note == note]
        where = f"{first.origin.text}: {dotted(first.path)}" if first.origin else dotted(first.path)
        more = f" (and {len(others)} more)" if others else ""
        document.notes.append(f"{where}{more} {note}")


def adopt_override(
    path: KeyPath, value: Any, document: Document, root: type[BaseModel], shown: str
) -> tuple[KeyPath, Any] | None:
    """The path of an override in keys of ours, and the value there: `value` itself unless a key is read as one of ours
    with another value. None for a key that is dropped.

    Args:
        path: as it was typed.
        value: what the last key is set to.
        document: holds the data that the override is for, and takes the notes.
        root: the class of that data.
        shown: the override in a note.
    """
    place, data, own = ConfigNode.root(root), document.data, ()
    for depth, key in enumerate(path):
        model, given = place.model_for(data), value if depth == len(path) - 1 else _NOT_READ
        # What the key of ours is set to in the file does not count: an override takes its place.
        if respelt := _respelt(model, key, given, {}):
            if note := _former(model, key, given, respelt):
                document.notes.append(f"{shown}: {dotted(path[: depth + 1])} {note}")
            key, value = respelt
        elif (found := _meaning(model, key, given)) is not None:
            key, note = found
            if note:
                document.notes.append(f"{shown}: {dotted(path[: depth + 1])} {note}")
            if key is None:
                return None
        own = (*own, key)
        place, data = place.step_or_nowhere(data, key), child(data, key)
    return own, value


def sets_type(path: KeyPath, value: Any, document: Document, root: type[BaseModel]) -> bool:
    """Returns true for an override that sets the `type` of a block, by that key or by a foreign one that means it."""
    *parent, key = path
    place, data = ConfigNode.root(root), document.data
    for step in parent:
        place, data = place.step_or_nowhere(data, step), child(data, step)
    respelt = _respelt(place.model_for(data), key, value, {})
    return (key if respelt is None else respelt[0]) == "type"


def _adopt(place: ConfigNode, data: Any, path: KeyPath, document: Document) -> Iterator[_Found]:
    if isinstance(data, list):
        for index, item in enumerate(data):
            yield from _adopt(place.step_or_nowhere(data, index), item, (*path, index), document)
    if not isinstance(data, dict):
        return
    model = place.model_for(data)
    for key in list(data):
        if respelt := _respelt(model, key, data[key], data):
            yield _Found((*path, key), document.key_origin((*path, key)), _former(model, key, data[key], respelt))
            own, data[own] = respelt
            del data[key]
            document.move((*path, key), (*path, own))
            continue
        meaning = _meaning(model, key, data[key])
        beside = meaning[0] if meaning and meaning[0] in data else None
        if meaning and beside is not None and beside in lists_of(model).replaced_keys.get(key, ()):
            document.forget((*path, beside))
            del data[beside]
            meaning = beside, f"{meaning[1]}, in the place of the {beside} beside it, which has no effect"
        # Two keys that mean the same would hide one of two values: the foreign one stays, and is refused.
        if meaning is None or meaning[0] in data:
            continue
        own, note = meaning
        yield _Found((*path, key), document.key_origin((*path, key)), note)
        value = data.pop(key)
        if own is None:
            document.forget((*path, key))
        else:
            data[own] = value
            document.move((*path, key), (*path, own))
    for key, item in data.items():
        yield from _adopt(place.step_or_nowhere(data, key), item, (*path, key), document)


def _respelt(model: type[BaseModel] | None, key: str | int, value: Any, block: Any) -> tuple[str, Any] | None:
    """The key and the value of ours that a foreign key with this value means; else None."""
    if not isinstance(key, str) or not isinstance(value, bool | int | str):
        return None
    found = lists_of(model).respelt_keys.get(key, {}).get(value)
    return None if found is None or found[0] in block else found


def _former(model: type[BaseModel] | None, key: str | int, value: Any, respelt: tuple[str, Any]) -> str:
    """The note on a key of ours whose value was spelt so once; empty for a foreign key."""
    return f"{value} is read as {respelt[0]}: {respelt[1]}" if key in lists_of(model).model_fields else ""


def _meaning(model: type[BaseModel] | None, key: str | int, value: Any) -> tuple[str | None, str] | None:
    """The key of ours (None: it is dropped) and a note, for a foreign key that is not refused; else None."""
    lists = lists_of(model)
    if key in lists.model_fields or not isinstance(key, str):
        return None
    ignored, renamed = lists.ignored_keys.get(key), lists.renamed_keys.get(key)
    # What is unset there says nothing.
    if value is None and (ignored or renamed or key in lists.refused_keys):
        return None, ""
    if renamed is not None:
        return renamed, f"is read as {renamed}"
    if ignored is not None and (ignored.values is None or value in ignored.values):
        return None, f"has no effect: {ignored.reason}"
    return None
