"""Errors of pydantic as a person would put them, each at the position of the mistake."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lm_trainer.config.config_node import ConfigNode, NoSuchKey, all_keys, child
from lm_trainer.config.document import Document, KeyPath, Problem, did_you_mean, display, dotted, nearest, suggest
from lm_trainer.config.foreign import lists_of
from lm_trainer.config.shape import Shape, tags
from lm_trainer.core.credentials import is_secret_name

# By the first word of pydantic's name of an error: `int_parsing`, `int_type` and `int_from_float` are alike.
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "dict": "a block of keys",
    "mapping": "a block of keys",
    "model": "a block of keys",
    "none": "null",
    "finite": "a finite number",
}
# By pydantic's name of an error: the key of the limit in its context, and the phrase.
_LIMITS = {
    "greater_than": ("gt", "a number greater than {}"),
    "greater_than_equal": ("ge", "a number of at least {}"),
    "less_than": ("lt", "a number less than {}"),
    "less_than_equal": ("le", "a number of at most {}"),
    "multiple_of": ("multiple_of", "a multiple of {}"),
    "too_short": ("min_length", "at least {} items"),
    "too_long": ("max_length", "at most {} items"),
    "string_too_short": ("min_length", "at least {} characters"),
    "string_too_long": ("max_length", "at most {} characters"),
    "string_pattern_mismatch": ("pattern", "text that matches {}"),
}
SECRET_REFUSED = (
    "looks like a secret, and a configuration is saved with the run; remove it and set it in the environment "
    "(HF_TOKEN, WANDB_API_KEY)"
)
_MAX_LISTED = 12
"""Keys that are listed when none is near to what was written."""


class Explainer:
    """Translator of the errors of a document whose root should be a `root`; records them as its problems."""

    def __init__(self, document: Document, root: type[BaseModel]):
        self.document = document
        self.root = root

    def find(self, path: KeyPath) -> tuple[ConfigNode | None, Any]:
        """The place of `path`, None if there is none, and the value there."""
        place, value = ConfigNode.root(self.root), self.document.data
        for key in path:
            try:
                place = place.step(value, key)
            except NoSuchKey:
                return None, None
            value = child(value, key)
        return place, value

    def explain(self, error: ValidationError) -> None:
        """Records every error of a failed validation."""
        # pydantic reports each member of a union that did not fit; together they are one mistake of the user.
        groups: dict[KeyPath, list[ErrorDetails]] = {}
        for path, detail in self._located(error, ConfigNode.root(self.root), self.document.data):
            groups.setdefault(path, []).append(detail)
        for path in [path for path, details in groups.items() if details[0]["type"] == "union_tag_invalid"]:
            groups |= self._below_unknown_type(path)
        for path, details in groups.items():
            self._report(path, details)

    def _below_unknown_type(self, path: KeyPath) -> dict[KeyPath, list[ErrorDetails]]:
        """The errors in a block of unknown `type` that are errors whichever type was meant, by their paths."""
        place, block = self.find(path)
        if place is None or not isinstance(block, dict):
            return {}
        models = [model for model in place.models(block, every=True) if tags(model)]
        found = [self._as_if(model, path, block) for model in models]
        below_key: dict[int | str, dict[KeyPath, None]] = defaultdict(dict)
        for below in (below for one in found for below in one if len(below) > len(path)):
            below_key[below[len(path)]][below] = None
        errors: dict[KeyPath, list[ErrorDetails]] = {}
        for key in block.keys() - {"type"}:
            # A type without the key says nothing about its value, unless none has it.
            having = [one for model, one in zip(models, found, strict=True) if key in model.model_fields] or found
            for below in below_key[key]:
                if all(below in one for one in having):
                    errors[below] = having[0][below]
        # In the order of the file.
        return {below: errors[below] for one in found for below in one if below in errors}

    def _as_if(self, model: type[BaseModel], path: KeyPath, block: dict[str, Any]) -> dict[KeyPath, list[ErrorDetails]]:
        """The errors of the block at `path` if it were of one class of its union."""
        typed = {**block, "type": tags(model)[0]}
        try:
            model.model_validate(copy.deepcopy(typed))
        except ValidationError as error:
            groups: dict[KeyPath, list[ErrorDetails]] = {}
            for below, detail in self._located(error, ConfigNode.root(model), typed, path):
                groups.setdefault(below, []).append(detail)
            return groups
        return {}

    def _located(
        self, error: ValidationError, place: ConfigNode, value: Any, path: KeyPath = ()
    ) -> Iterator[tuple[KeyPath, ErrorDetails]]:
        """Yields the errors of `value`, which stands at a place with this path, each with its own path."""
        for detail in error.errors(include_url=False):
            below = self._path_of(detail["loc"], place, value, path)
            if below is not None and not self.document.is_unreadable(below):
                yield below, detail

    @staticmethod
    def _path_of(location: tuple[int | str, ...], place: ConfigNode, value: Any, path: KeyPath) -> KeyPath | None:
        """Turns the location of an error into a path, without names of union members; None for a member not meant."""
        for index, key in enumerate(location):
            if place.shape.alternatives:
                # A member is named, not a key. Of those that cannot hold such a value (a list, a block) nothing is said
                # if another can.
                branch = place.shape.branch(str(key))
                if not _fits(branch, value) and any(_fits(other, value) for other in place.shape.alternatives):
                    return None
                place = ConfigNode(branch, place.default)
            elif place.shape.tagged and isinstance(value, dict):
                # The `type` is named, not a key.
                model = place.model_for(value)
                place = ConfigNode(Shape("model", model, (model,) if model else ()), place.default)
            elif location[index + 1 :] == ("[key]",):
                return path
            else:
                path = (*path, key)
                try:
                    place = place.step(value, key)
                except NoSuchKey:
                    return path
                value = child(value, key)
        return path

    def _report(self, path: KeyPath, details: Sequence[ErrorDetails]) -> None:
        """Records the errors at one place: each message of a validator, but those of a union's members as one."""
        kinds = {detail["type"] for detail in details}
        if "extra_forbidden" in kinds:
            self.document.report(path, self.unknown_key(path), at_key=True)
        elif "missing" in kinds:
            self.document.report(path, "required, but missing")
        elif "union_tag_invalid" in kinds:
            context = details[0].get("ctx", {})
            options, found = _quoted(context.get("expected_tags")), str(context.get("tag"))
            reason = self._refused_type(path, found)
            text = f"unknown type {found!r}, expected {_one_of(options)}{reason or did_you_mean(found, options)}"
            self.document.report((*path, "type"), text)
        elif own := [d for d in details if d["type"] in ("value_error", "assertion_error")]:
            for detail in own:
                self._report_validator_message(path, str(detail.get("ctx", {}).get("error", detail["msg"])))
        else:
            self._report_expected(path, details)

    def _refused_type(self, path: KeyPath, found: str) -> str:
        """The reason why the union at `path` lacks a type, behind a semicolon; empty without one."""
        place, _ = self.find(path)
        models = place.models(None, every=True) if place else ()
        reasons = (lists_of(model).refused_types.get(found) for model in models)
        return next((f"; {reason}" for reason in reasons if reason), "")

    def _report_expected(self, path: KeyPath, details: Sequence[ErrorDetails]) -> None:
        wanted = list(dict.fromkeys(self._expected(detail, path) for detail in details))
        found = details[0]["input"]
        hint = ""
        if isinstance(found, str):
            hint = did_you_mean(found, [o for d in details for o in _options(d)])
        elif "text" in wanted and isinstance(found, bool | int | float):
            hint = "; quote it to make it text"
        self.document.report(path, f"expected {' or '.join(wanted)}, got {display(found)}{hint}")

    def _expected(self, detail: ErrorDetails, path: KeyPath) -> str:
        kind, context = detail["type"], detail.get("ctx", {})
        if kind in ("literal_error", "enum"):
            return _one_of(_options(detail)) or str(context.get("expected"))
        if kind in _LIMITS:
            name, text = _LIMITS[kind]
            limit = context.get(name)
            return text.format(f"{limit:g}" if isinstance(limit, float) else limit)
        if kind in ("union_tag_not_found", "model_type", "model_attributes_type"):
            place, _ = self.find(path)
            options = [tag for m in (place.models(None, every=True) if place else ()) for tag in tags(m)]
            return f"a block with type: {_one_of(options)}" if len(options) > 1 else "a block of keys"
        return _TYPES.get(kind.split("_")[0]) or detail["msg"].removeprefix("Input should be ")

    def unknown_key(self, path: KeyPath, *, full: bool = False) -> str:
        """Says why there is no key at `path`, and which one was meant; with `full`, suggestions are whole paths."""
        parent, key = path[:-1], str(path[-1])
        place, value = self.find(parent)
        if place is None:
            return "unknown key"
        if path == ("include",):
            return "unknown key; a file can stand for the value of a key (data: !include data.yaml), not be merged"
        models = place.models(value)
        for model in models:
            lists = lists_of(model)
            if key in lists.renamed_keys:
                return f"means the same as {lists.renamed_keys[key]}, which is set too; remove one of them"
            reason = lists.refused_keys.get(key)
            if reason is not None:
                return f"refused: {reason}"
        if is_secret_name(key):
            return SECRET_REFUSED
        others = _types_with(place, models, key)
        if models and others:
            chosen = "" if (*parent, "type") in self.document.values else " by default"
            own = tags(models[0])[0]
            return f"a key of type {_one_of(others)}, but this block has type {own!r}{chosen}; set its `type`"
        return f"unknown key{self._suggestion(path, models, full)}"

    @cached_property
    def _known(self) -> list[tuple[str, str]]:
        """Every dotted key that may be written in the document, and its last part."""
        keys = all_keys(ConfigNode.root(self.root), self.document.data)
        return [(name, name.rsplit(".", 1)[-1]) for name in keys]

    def _suggestion(self, path: KeyPath, models: Sequence[type[BaseModel]], full: bool) -> str:
        if not self.document.may_suggest():
            return ""
        parent, key = path[:-1], str(path[-1])
        prefix = f"{dotted(parent)}." if full and parent else ""
        here = list(dict.fromkeys(name for model in models for name in model.model_fields))
        same = [name for name, last in self._known if last == key]
        near = nearest(key, [last for _, last in self._known], strict=True)
        # From the likeliest: misspelt here, the same key elsewhere, vaguely like one here, misspelt elsewhere.
        return (
            did_you_mean(key, here, prefix=prefix, strict=True)
            or suggest(same[:2])
            or did_you_mean(key, here, prefix=prefix)
            or suggest([name for name, last in self._known if last in near][:2])
            or (f"; there are {', '.join(here)}" if 0 < len(here) <= _MAX_LISTED else "")
        )

    def _report_validator_message(self, path: KeyPath, message: str) -> None:
        """Records the message of a validator at the key that it names, or else mentions."""
        if path:
            message = message.removeprefix(f"{path[-1]}: ")
        place, value = self.find(path)
        # `keep: only the last entry may lack until` is about the key `keep` of this block.
        while (match := re.match(r"(\w+): ", message)) and match[1] in _keys(place, value):
            path, message = (*path, match[1]), message[match.end() :]
            place, value = self.find(path)
        keys = {*_keys(place, value), *(value if isinstance(value, dict) else ())}
        spoken_of = [(*path, word) for word in dict.fromkeys(re.findall(r"\w+", message)) if word in keys]
        written = [p for p in spoken_of if p in self.document.values]
        # Of several keys that do not fit together, the one on the command line is the news.
        written.sort(key=lambda p: not self.document.values[p].is_override)
        origin = self.document.origin(written[0] if written else path)
        self.document.problems.append(Problem(origin, f"{dotted(path)}: {message}" if path else message))


def _keys(place: ConfigNode | None, value: Any) -> set[str]:
    """The declared keys of a block."""
    return {name for model in (place.models(value) if place else ()) for name in model.model_fields}


def _fits(shape: Shape, value: Any) -> bool:
    if isinstance(value, dict):
        return shape.kind in ("model", "mapping")
    if isinstance(value, list | tuple):
        return shape.kind == "list"
    return shape.kind == "scalar"


def _quoted(text: Any) -> list[str]:
    return re.findall(r"'([^']*)'", str(text))


def _options(detail: ErrorDetails) -> list[str]:
    return _quoted(detail.get("ctx", {}).get("expected")) if detail["type"] in ("literal_error", "enum") else []


def _one_of(options: Sequence[str]) -> str:
    quoted = [repr(option) for option in options]
    return " or ".join(filter(None, [", ".join(quoted[:-1]), *quoted[-1:]]))


def _types_with(place: ConfigNode, models: Sequence[type[BaseModel]], key: str) -> list[str]:
    """The types of the other classes of a union that have `key`."""
    every = place.models(None, every=True)
    return [tags(m)[0] for m in every if m not in models and key in m.model_fields and tags(m)]
