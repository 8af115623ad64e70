"""Overrides, which are settings from the command line: `trainer.seed=1`, `--trainer.seed 1` or `--trainer.seed=1`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, JsonValue

from lm_trainer.config.config_node import ConfigNode, NoSuchKey, add_missing_types, all_keys, child_value
from lm_trainer.config.document import (
    Document,
    KeyPath,
    Origin,
    Problem,
    did_you_mean,
    dotted_key,
    format_suggestions,
    format_value,
)
from lm_trainer.config.explain import SECRET_REFUSED, Explainer
from lm_trainer.config.foreign import config_class_of, rename_foreign_keys, sets_type, translate_override
from lm_trainer.config.value_type import type_tags
from lm_trainer.config.yaml_nodes import parse_override_value
from lm_trainer.core.credentials import COMMAND, is_secret_name, without_credentials

_SOURCE = 1 << 20
"""Source number of the command line, with which overrides sort after all files."""
_MAX_SHOWN = 100
"""Maximum number of characters of an override in a message."""
_BRACKETED = re.compile(r"\[(.*)\]", re.DOTALL)
_KEY = re.compile(r"[^\w.-]")
_INNER_KEY = re.compile(r"[\w-]+(?=['\"]?\s*:)")
_STARTS_ANOTHER = re.compile(r"--|[\w.]+=|[a-z_]+\.[a-z_]+")
_SHORT_OPTION = re.compile(r"-[A-Za-z]")
_LIST_ITEM = re.compile(r"(?:[^,{}]|\{[^{}]*\})+")


@dataclass(frozen=True)
class Override:
    """A setting from the command line."""

    path: KeyPath
    text: str
    origin: Origin


@dataclass
class _TypedSetting:
    """The words of one setting, and the problem with them if there is one."""

    words: list[str]
    name: str
    text: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Suggestions:
    """Names to suggest for an unknown option in addition to keys."""

    options: Sequence[str] = ()
    """Options of the command, such as `--dry-run`."""
    foreign: Callable[[str], str | Sequence[str]] | None = None
    """Returns our keys for an option name of other frameworks, or a sentence if another name is not enough."""


def parse_overrides(
    arguments: Sequence[str], document: Document, root: type[BaseModel], suggestions: Suggestions
) -> list[Override]:
    """Parses the arguments. An argument that is not an override becomes a problem of the document.

    Args:
        arguments: the words of the command line after the configuration file.
        document: the document to which problems are added.
        root: the class whose keys can be set.
        suggestions: names to suggest for misspelt words.
    """
    parsed: list[Override] = []
    remaining_words = list(arguments)
    while remaining_words:
        order = (_SOURCE, len(arguments) - len(remaining_words), 0)
        setting = _take_setting(remaining_words, root, suggestions, document)
        shown = _format_setting(setting)
        if setting.problem:
            location = f"override `{shown}`" if "=" in shown else shown
            document.problems.append(Problem(Origin(order, location), setting.problem))
            continue
        first, *inner = setting.name.split(".")
        path = (first, *(int(part) if part.isdecimal() else part for part in inner))
        parsed.append(Override(path, setting.text, Origin(order, f"override `{shown}`", is_override=True)))
    # Blocks come before the keys inside them, and types before other keys, regardless of the order on the command line.
    return sorted(
        parsed,
        key=lambda override: (
            len(override.path) - sets_type(override.path, _parse_plain_value(override), document, root)
        ),
    )


def _format_setting(setting: _TypedSetting) -> str:
    """Returns the setting as messages show it, without values that may be secret."""
    if any(map(is_secret_name, (setting.name, *_INNER_KEY.findall(setting.text)))):
        return f"{_KEY.split(setting.name)[0]}=..."
    text = " ".join(setting.words)
    if COMMAND in (setting.name.rsplit(".", 1)[-1], *_INNER_KEY.findall(setting.text)):
        text = without_credentials({COMMAND: text})[COMMAND]
    return textwrap.shorten(text, _MAX_SHOWN, placeholder=" ...")


def _take_setting(
    remaining_words: list[str], root: type[BaseModel], suggestions: Suggestions, document: Document
) -> _TypedSetting:
    """Removes the words of one setting from the front of `remaining_words`."""
    word = remaining_words.pop(0)
    name, equals, text = word.removeprefix("--").partition("=")
    setting = _TypedSetting([word], name.strip(), text)
    if word.startswith("--"):
        setting.name = name.replace("-", "_")
        if "." not in name and setting.name not in root.model_fields:
            hint = _suggest_options(word.partition("=")[0], root, suggestions) if document.may_suggest() else ""
            setting.problem = f"no such option{hint}"
            # Skips the value of the option, which would be reported as a second problem.
            if remaining_words and not equals and not _STARTS_ANOTHER.match(remaining_words[0]):
                remaining_words.pop(0)
            return setting
        if not equals:
            if not remaining_words or remaining_words[0].startswith("--"):
                setting.problem = "a value is missing"
                return setting
            setting.text = remaining_words.pop(0)
            setting.words.append(setting.text)
    elif _SHORT_OPTION.match(word):
        # Short options as in SLURM or tar: `-p gpu` or `-pgpu`.
        meant = [option for option in suggestions.options if option[2:3] == word[1].lower()]
        setting.problem = f"no such option{format_suggestions(meant[:3])}"
        if (
            remaining_words
            and len(word) == 2
            and not _STARTS_ANOTHER.match(remaining_words[0])
            and "=" not in remaining_words[0]
        ):
            remaining_words.pop(0)
        return setting
    elif not equals or not name:
        setting.problem = _explain_non_override(word, remaining_words, root)
        return setting
    if not all(setting.name.split(".")):
        setting.problem = "a key has no empty parts"
    elif not setting.text:
        setting.problem = 'has no value; write null to unset the key, or "" for empty text'
    return setting


def _suggest_options(word: str, root: type[BaseModel], suggestions: Suggestions) -> str:
    """Returns what to write instead of a word: a sentence, or options formatted by `format_suggestions`."""
    keys = [f"--{key}" for key in all_keys(ConfigNode.root(root))]
    foreign = suggestions.foreign(word.lstrip("-")) if suggestions.foreign is not None else ()
    if isinstance(foreign, str):
        return f"; {foreign}"
    from_foreign = [f"--{key}" for key in foreign if f"--{key}" in keys]
    return format_suggestions(from_foreign) or did_you_mean(word, suggestions.options) or did_you_mean(word, keys)


def _explain_non_override(word: str, remaining_words: list[str], root: type[BaseModel]) -> str:
    if word.split(".")[0] in root.model_fields and remaining_words and "=" not in remaining_words[0].lstrip("="):
        following = remaining_words.pop(0)
        if following == "=" and remaining_words:
            following = remaining_words.pop(0)
        if is_secret_name(word):
            return SECRET_REFUSED
        meant = textwrap.shorten(f"{word}={following.lstrip('=')}", _MAX_SHOWN, placeholder=" ...")
        return f"expected KEY=VALUE; did you mean {meant}?"
    return "expected KEY=VALUE, such as trainer.num_train_steps=100"


def apply_overrides(overrides: Sequence[Override], document: Document, root: type[BaseModel]) -> None:
    """Applies the overrides to the document's data. An override that does not fit becomes a problem."""
    for override in overrides:
        try:
            _apply_override(override, document, root)
        except ValueError as error:
            document.problems.append(Problem(override.origin, f"{dotted_key(override.path)}: {error}"))


def _apply_override(override: Override, document: Document, root: type[BaseModel]) -> None:
    plain = _parse_plain_value(override)
    adopted = translate_override(override.path, plain, document, root, override.origin.text)
    if adopted is None:
        return
    our_path, meant = adopted
    override = replace(override, path=our_path)
    node, holders = _find_containers(override, document, root)
    key, holder = override.path[-1], holders[-1]
    value = _parse_value(override, node) if meant is plain else meant
    rename_foreign_keys(node, value, override.path, document)
    # Inserts new blocks only now that no step can fail any more.
    for outer, inner, step in zip(holders, holders[1:], override.path, strict=False):
        outer[step] = inner
    parent, _ = Explainer(document, root).find_node(override.path[:-1])
    if key == "type" and isinstance(holder, dict) and not _is_same_type(parent, holder.get("type"), value):
        _clear_block(holder, override, document)
    elif value not in (None, [], {}):
        _drop_replaced_keys(ConfigNode.root(root), override, document)
    document.drop_positions(override.path)
    holder[key] = add_missing_types(node, value)
    # Sets positions only for the typed value, since a `type` added by default has no position.
    for path in (override.path, *_iter_nested_paths(value, override.path)):
        document.values[path] = document.keys[path] = override.origin


def _find_containers(override: Override, document: Document, root: type[BaseModel]) -> tuple[ConfigNode, list[Any]]:
    """Finds the node of an override, and the blocks and lists that enclose it, from the root on. Makes missing ones.

    Raises:
        ValueError: if the path is not allowed.
    """
    node, value, holders = ConfigNode.root(root), document.data, []
    for depth, key in enumerate(override.path):
        parent = override.path[:depth]
        if depth:
            value = _enter_container(value, key, node, override, depth)
        holders.append(value)
        try:
            inner = node.child(value, key)
        except NoSuchKey as reason:
            if isinstance(key, str) and node.candidate_models(value):
                raise ValueError(Explainer(document, root).explain_unknown_key((*parent, key), full=True)) from None
            raise ValueError(f"{dotted_key(parent)} {reason}") from None
        if isinstance(value, list) and not (isinstance(key, int) and key < len(value)):
            raise ValueError(f"{dotted_key(parent)} has {len(value)} items, counted from 0")
        node, value = inner, child_value(value, key)
    return node, holders


def _enter_container(value: object, key: str | int, node: ConfigNode, override: Override, depth: int) -> object:
    """Returns the block or list that contains `key`, which is the existing value or else a new block.

    Raises:
        ValueError: if the existing value is a scalar, or a list instead of a block or vice versa.
    """
    parent, suffix = dotted_key(override.path[:depth]), dotted_key(override.path[depth + 1 :])
    if isinstance(key, int):
        if isinstance(value, dict):
            raise ValueError(
                f"{parent} is one block, not a list; {f'use {parent}.{suffix}=...' if suffix else 'name a key of it'}"
            )
        if value is None and node.value_type.find_alternative("list"):
            raise ValueError(f"{parent} is not set, so no item of it can be changed; give the whole list")
        return value
    if isinstance(value, list):
        hint = f"; name an item by its number: {parent}.0.{key}" if node.value_type.find_alternative("list") else ""
        raise ValueError(f"{parent} is a list{hint}")
    if value is None or (key == "type" and not isinstance(value, dict) and node.candidate_models(None)):
        return add_missing_types(node, {})
    if not isinstance(value, dict):
        hint = f"; set {parent}.type too" if any(map(type_tags, node.candidate_models(None, all_classes=True))) else ""
        raise ValueError(f"{parent} is {format_value(value)}, not a block of keys{hint}")
    return value


def _is_same_type(node: ConfigNode | None, old: object, new: object) -> bool:
    """Returns True if the new `type` of a block is the same as the old one or an alias of it."""
    classes = [node.model_for({"type": name}) for name in (old, new)] if node else [None, None]
    return old == new or (classes[0] is not None and classes[0] is classes[1])


def _clear_block(holder: dict[str, object], override: Override, document: Document) -> None:
    """Clears a block whose type changes, because its keys belong to the old type."""
    parent = override.path[:-1]
    dropped = [key for key in holder if key != "type"]
    for key in dropped:
        document.drop_positions((*parent, key))
        del holder[key]
    if dropped:
        names = ", ".join(dotted_key((*parent, key)) for key in dropped)
        document.notes.append(f"{override.origin.text} starts a new block, without {names} of the file")


def _drop_replaced_keys(node: ConfigNode, override: Override, document: Document) -> None:
    """Drops the keys of the file that the override replaces according to `Config.replaced_keys`."""
    *parent, key = override.path
    block = document.data
    for step in parent:
        node, block = node.child_or_undeclared(block, step), child_value(block, step)
    replaced = config_class_of(node.model_for(block)).replaced_keys.get(str(key), ())
    paths = {other: (*parent, other) for other in replaced if block.get(other) not in (None, [])}
    keys_of_file = [other for other, path in paths.items() if not _is_overridden(path, document)]
    for other in keys_of_file:
        document.drop_positions(paths[other])
        del block[other]
    if keys_of_file:
        names = ", ".join(dotted_key(paths[other]) for other in keys_of_file)
        document.notes.append(f"{override.origin.text} takes the place of {names} of the file")


def _is_overridden(path: KeyPath, document: Document) -> bool:
    return path in document.values and document.values[path].is_override


def _parse_value(override: Override, node: ConfigNode) -> JsonValue:
    """Returns the value of an override's text, as interpreted at its node."""
    text = override.text.strip()
    listed = _BRACKETED.fullmatch(text)
    try:
        value = parse_override_value(text, override.path, override.origin)
    except ValueError:
        # The shell may have removed the quotes in ["a-{1..8}.jsonl"].
        if listed and node.value_type.find_alternative("list"):
            return [_strip_list_item(item) for item in _LIST_ITEM.findall(listed[1])]
        if node.value_type.takes_as_text([]):
            return text
        raise
    # If only text is allowed, 123 is text, and so is `a #b`, which YAML would truncate.
    if value is not None and text[:1] not in ("'", '"') and node.value_type.takes_as_text(value):
        return text
    return value


def _parse_plain_value(override: Override) -> JsonValue:
    """Returns the value of an override regardless of its node, which is its text if it is not valid YAML."""
    try:
        return parse_override_value(override.text.strip(), override.path, override.origin)
    except ValueError:
        return override.text


def _strip_list_item(text: str) -> str:
    return text.strip().strip("'\"")


def _iter_nested_paths(value: object, path: KeyPath) -> Iterator[KeyPath]:
    """Yields the paths of all values that are nested in a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _iter_nested_paths(inner, (*path, key))
