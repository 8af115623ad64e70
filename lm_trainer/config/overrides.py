"""Settings on the command line: `trainer.seed=1`, `--trainer.seed 1` and `--trainer.seed=1`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from lm_trainer.config.document import Document, Origin, Path_, Problem, did_you_mean, display, dotted
from lm_trainer.config.explain import Explainer
from lm_trainer.config.secret import is_secret_name
from lm_trainer.config.shape import NoSuchKey, Place, all_keys, child, tags
from lm_trainer.config.yaml_nodes import read_text

_SOURCE = 1 << 20
"""Overrides sort after all files."""
_BRACKETED = re.compile(r"\[(.*)\]", re.DOTALL)
_LIST_ITEM = re.compile(r"(?:[^,{}]|\{[^{}]*\})+")


@dataclass(frozen=True)
class Override:
    """One setting as it was typed."""

    path: Path_
    text: str
    origin: Origin


def parse(
    arguments: Sequence[str], document: Document, root: type[BaseModel], options: Sequence[str] = ()
) -> list[Override]:
    """Reads the arguments; what is no override becomes a problem of the document.

    Args:
        arguments: what stands on the command line after the configuration file.
        document: takes the problems.
        root: the class whose keys can be set.
        options: the options of the command (`--dry-run`), one of which a misspelt word may have meant.
    """
    found: list[Override] = []
    waiting = list(arguments)
    while waiting:
        number = len(arguments) - len(waiting)
        word = waiting.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        dashed = word.startswith("--")
        problem = ""
        if dashed and "." not in name and name.replace("-", "_") not in root.model_fields:
            every = [*options, *(f"--{key}" for key in all_keys(Place.root(root), document.data))]
            problem = (
                f"no such option{did_you_mean(word.partition('=')[0], options) or did_you_mean(f'--{name}', every)}"
            )
            if waiting and not equals and not re.match(r"--|[\w.]+=|[a-z_]+\.[a-z_]+", waiting[0]):
                waiting.pop(0)
        elif dashed and not equals:
            if not waiting or waiting[0].startswith("--"):
                problem = "a value is missing"
            else:
                text = waiting.pop(0)
                word = f"{word} {text}"
        elif not equals or not name:
            problem = _not_an_override(word, waiting, root)
        elif not text:
            problem = 'has no value; write null to unset the key, or "" for empty text'
        path = tuple(int(part) if part.isdecimal() else part for part in _key(name, dashed).split("."))
        if is_secret_name(name):
            word = word.partition("=")[0].partition(" ")[0] + "=..."
        origin = Origin((_SOURCE, number, 0), f"override `{word}`", is_override=True)
        if problem:
            document.problems.append(Problem(Origin(origin.order, word) if "=" not in word else origin, problem))
        else:
            found.append(Override(path, text, origin))
    # A block, or its type, is settled before the keys inside it, in whatever order they were typed.
    return sorted(found, key=lambda override: len(override.path) - (override.path[-1] == "type"))


def _key(name: str, dashed: bool) -> str:
    return name.strip().replace("-", "_") if dashed else name.strip()


def _not_an_override(word: str, waiting: list[str], root: type[BaseModel]) -> str:
    if word.split(".")[0] in root.model_fields and waiting and "=" not in waiting[0].lstrip("="):
        following = waiting.pop(0)
        if following == "=" and waiting:
            following = waiting.pop(0)
        return f"expected KEY=VALUE; did you mean {word}={following.lstrip('=')}?"
    return "expected KEY=VALUE, such as trainer.num_train_steps=100"


def apply(overrides: Sequence[Override], document: Document, root: type[BaseModel]) -> None:
    """Puts the overrides into the document's data; what does not fit becomes a problem."""
    for override in overrides:
        try:
            _apply_one(override, document, root)
        except ValueError as error:
            document.problems.append(Problem(override.origin, f"{dotted(override.path)}: {error}"))


def _apply_one(override: Override, document: Document, root: type[BaseModel]) -> None:
    place, holder = _descend(override, document, root)
    key = override.path[-1]
    _check_index(holder, key, override.path[:-1])
    value = _value(override, place)
    if key == "type" and isinstance(holder, dict) and holder.get("type") != value:
        _start_afresh(holder, override, document)
    document.forget(override.path)
    holder[key] = value
    document.values[override.path] = document.keys[override.path] = override.origin
    for below in _below(value, override.path):
        document.values[below] = document.keys[below] = override.origin


def _descend(override: Override, document: Document, root: type[BaseModel]) -> tuple[Place, Any]:
    """The place that the override names, and the block or list which holds it; missing blocks are made."""
    explainer = Explainer(document, root)
    place, value, path = Place.root(root), document.data, override.path
    for depth, key in enumerate(path):
        at = path[:depth]
        try:
            inner = place.step(value, key)
        except NoSuchKey as reason:
            if depth and isinstance(key, str) and place.models(value):
                raise ValueError(explainer.unknown_key(path[: depth + 1], full=True)) from None
            if depth == 0:
                raise ValueError(explainer.unknown_key(path[:1], full=True)) from None
            raise ValueError(f"{dotted(at)} {reason}") from None
        if depth == len(path) - 1:
            return inner, value
        _check_index(value, key, at)
        value = _entered(value, key, path[: depth + 1], override, inner)
        place = inner
    raise AssertionError("a path has at least one key")


def _entered(holder: Any, key: str | int, path: Path_, override: Override, place: Place) -> Any:
    """The block or list at `path`, made if there is none.

    Raises:
        ValueError: if a plain value, or the other of block and list, stands there.
    """
    value, following = child(holder, key), override.path[len(path)]
    if isinstance(following, int):
        if isinstance(value, list):
            return value
        what = "is one block, not a list" if isinstance(value, dict) else "is not set, so no item of it can be changed"
        example = f"{dotted(path)}.{dotted(override.path[len(path) + 1 :])}=..." if isinstance(value, dict) else ""
        raise ValueError(f"{dotted(path)} {what}; " + (f"use {example}" if example else "give the whole list"))
    if isinstance(value, list):
        raise ValueError(f"{dotted(path)} is a list; name an item by its number: {dotted(path)}.0.{following}")
    if isinstance(value, dict):
        return value
    if value is not None and following != "type":
        hint = f"; set {dotted(path)}.type too" if any(map(tags, place.models(None, every=True))) else ""
        raise ValueError(f"{dotted(path)} is {display(value)}, not a block of keys{hint}")
    holder[key] = {}
    return holder[key]


def _check_index(holder: Any, key: str | int, path: Path_) -> None:
    if isinstance(holder, list) and not (isinstance(key, int) and key < len(holder)):
        raise ValueError(f"{dotted(path)} has {len(holder)} items, counted from 0")


def _start_afresh(holder: dict[str, Any], override: Override, document: Document) -> None:
    """Empties a block whose type changes: its keys were meant for the other type."""
    parent = override.path[:-1]
    dropped = [key for key in holder if key != "type"]
    for key in dropped:
        document.forget((*parent, key))
        del holder[key]
    if dropped:
        names = ", ".join(dotted((*parent, key)) for key in dropped)
        document.notes.append(f"{override.origin.text} starts a new block, without {names} of the file")


def _value(override: Override, place: Place) -> Any:
    """What the text of an override means where it stands."""
    text = override.text
    listed = _BRACKETED.fullmatch(text.strip())
    try:
        value = read_text(text, override.path, override.origin)
    except ValueError:
        # A shell may have eaten the quotes of ["a-{1..8}.jsonl"].
        if listed and place.shape.choice("list"):
            return [_list_item(item) for item in _LIST_ITEM.findall(listed[1])]
        if place.shape.accepts_text_only():
            return text
        raise
    if place.shape.accepts_text_only() and isinstance(value, bool | int | float):
        return text
    return value


def _list_item(text: str) -> str:
    return text.strip().strip("'\"")


def _below(value: Any, path: Path_) -> Iterator[Path_]:
    """The paths of everything inside a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _below(inner, (*path, key))
