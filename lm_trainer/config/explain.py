"""Translates pydantic's errors into readable problems, each at the position of the mistake."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lm_trainer.config.config_node import ConfigNode, NoSuchKey, all_keys, child_value
from lm_trainer.config.document import (
    Document,
    KeyPath,
    Problem,
    did_you_mean,
    dotted_key,
    find_similar,
    format_suggestions,
    format_value,
)
from lm_trainer.config.foreign import config_class_of
from lm_trainer.config.value_type import ValueType, type_tags
from lm_trainer.core.credentials import is_secret_name

# Keyed by the first word of a pydantic error type. Thus `int_parsing`, `int_type` and `int_from_float` share an entry.
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
# Maps a pydantic error type to the key of the limit in the error's context, and to the phrase.
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
"""Maximum number of keys to list if no key is similar to the key in the file."""


class Explainer:
    """Translates validation errors of a document with root class `root`, and records them as problems in it."""

    def __init__(self, document: Document, root: type[BaseModel]):
        self.document = document
        self.root = root

    def find_node(self, path: KeyPath) -> tuple[ConfigNode | None, object]:
        """Returns the node at `path` (None if the path is not declared) and its value."""
        node, value = ConfigNode.root(self.root), self.document.data
        for key in path:
            try:
                node = node.child(value, key)
            except NoSuchKey:
                return None, None
            value = child_value(value, key)
        return node, value

    def report_errors(self, error: ValidationError) -> None:
        """Records every error of a failed validation."""
        # pydantic reports an error for each member of a union. To the user, they are one mistake.
        groups: dict[KeyPath, list[ErrorDetails]] = {}
        for path, detail in self._iter_errors(error, ConfigNode.root(self.root), self.document.data):
            groups.setdefault(path, []).append(detail)
        for path in [path for path, details in groups.items() if details[0]["type"] == "union_tag_invalid"]:
            groups |= self._errors_below_unknown_type(path)
        for path, details in groups.items():
            self._report_path(path, details)

    def _errors_below_unknown_type(self, path: KeyPath) -> dict[KeyPath, list[ErrorDetails]]:
        """Returns the errors in a block of unknown `type` that hold for every possible type, keyed by path."""
        node, block = self.find_node(path)
        if node is None or not isinstance(block, dict):
            return {}
        # A class that accepts undeclared keys cannot judge any key.
        models = [
            model
            for model in node.candidate_models(block, all_classes=True)
            if type_tags(model) and model.model_config.get("extra") != "allow"
        ]
        errors_by_model = [self._errors_if_model(model, path, block) for model in models]
        below_key: dict[int | str, dict[KeyPath, None]] = defaultdict(dict)
        for below in (below for model_errors in errors_by_model for below in model_errors if len(below) > len(path)):
            below_key[below[len(path)]][below] = None
        errors: dict[KeyPath, list[ErrorDetails]] = {}
        for key in block.keys() - {"type"}:
            # A type that does not have the key cannot judge its value, unless no type has the key.
            errors_of_models_with_key = [
                model_errors
                for model, model_errors in zip(models, errors_by_model, strict=True)
                if key in model.model_fields
            ] or errors_by_model
            for below in below_key[key]:
                if all(below in model_errors for model_errors in errors_of_models_with_key):
                    errors[below] = errors_of_models_with_key[0][below]
        # Keeps the order of the file.
        return {below: errors[below] for model_errors in errors_by_model for below in model_errors if below in errors}

    def _errors_if_model(
        self, model: type[BaseModel], path: KeyPath, block: dict[str, object]
    ) -> dict[KeyPath, list[ErrorDetails]]:
        """Returns the errors that the block at `path` would have if its class were `model`."""
        typed = {**block, "type": type_tags(model)[0]}
        try:
            model.model_validate(copy.deepcopy(typed))
        except ValidationError as error:
            groups: dict[KeyPath, list[ErrorDetails]] = {}
            for below, detail in self._iter_errors(error, ConfigNode.root(model), typed, path):
                groups.setdefault(below, []).append(detail)
            return groups
        return {}

    def _iter_errors(
        self, error: ValidationError, node: ConfigNode, value: object, path: KeyPath = ()
    ) -> Iterator[tuple[KeyPath, ErrorDetails]]:
        """Yields the errors of `value` at `path`, each with its full path."""
        for detail in error.errors(include_url=False):
            below = self._error_path(detail["loc"], node, value, path)
            if below is not None and not self.document.is_unreadable(below):
                yield below, detail

    @staticmethod
    def _error_path(location: tuple[int | str, ...], node: ConfigNode, value: object, path: KeyPath) -> KeyPath | None:
        """Converts an error location to a path without names of union members; None if a member was not meant."""
        for index, key in enumerate(location):
            if node.value_type.alternatives:
                # The location names a member, not a key. Skips members that cannot hold a value of this kind (a list, a
                # block) if another member can.
                branch = node.value_type.alternative_for_label(str(key))
                if not _may_hold(branch, value) and any(
                    _may_hold(other, value) for other in node.value_type.alternatives
                ):
                    return None
                node = ConfigNode(branch, node.default)
            elif node.value_type.tagged and isinstance(value, dict):
                # The location names the `type`, not a key.
                model = node.model_for(value)
                node = ConfigNode(ValueType("model", model, (model,) if model else ()), node.default)
            elif location[index + 1 :] == ("[key]",):
                return path
            else:
                path = (*path, key)
                try:
                    node = node.child(value, key)
                except NoSuchKey:
                    return path
                value = child_value(value, key)
        return path

    def _report_path(self, path: KeyPath, details: Sequence[ErrorDetails]) -> None:
        """Records the errors at one path: each validator message separately, but all errors of union members as one."""
        kinds = {detail["type"] for detail in details}
        if "extra_forbidden" in kinds:
            self.document.add_problem(path, self.explain_unknown_key(path), at_key=True)
        elif "missing" in kinds:
            self.document.add_problem(path, "required, but missing")
        elif "union_tag_invalid" in kinds:
            context = details[0].get("ctx", {})
            options, tag = _find_quoted(context.get("expected_tags")), str(context.get("tag"))
            reason = self._refused_type_reason(path, tag)
            text = (
                f"unknown type {tag!r}, expected {_format_alternatives(options)}{reason or did_you_mean(tag, options)}"
            )
            self.document.add_problem((*path, "type"), text)
        elif messages := [d for d in details if d["type"] in ("value_error", "assertion_error")]:
            for detail in messages:
                self._report_validator_message(path, str(detail.get("ctx", {}).get("error", detail["msg"])))
        else:
            self._report_unexpected_value(path, details)

    def _refused_type_reason(self, path: KeyPath, tag: str) -> str:
        """Returns a semicolon and the reason why the union at `path` does not support a type; empty if unknown."""
        node, _ = self.find_node(path)
        models = node.candidate_models(None, all_classes=True) if node else ()
        reasons = (config_class_of(model).refused_types.get(tag) for model in models)
        return next((f"; {reason}" for reason in reasons if reason), "")

    def _report_unexpected_value(self, path: KeyPath, details: Sequence[ErrorDetails]) -> None:
        expected = list(dict.fromkeys(self._describe_expected(detail, path) for detail in details))
        value = details[0]["input"]
        hint = ""
        if isinstance(value, str):
            hint = did_you_mean(value, [o for d in details for o in _expected_options(d)])
        elif "text" in expected and isinstance(value, bool | int | float):
            hint = "; quote it to make it text"
        self.document.add_problem(path, f"expected {' or '.join(expected)}, got {format_value(value)}{hint}")

    def _describe_expected(self, detail: ErrorDetails, path: KeyPath) -> str:
        kind, context = detail["type"], detail.get("ctx", {})
        if kind in ("literal_error", "enum"):
            return _format_alternatives(_expected_options(detail)) or str(context.get("expected"))
        if kind in _LIMITS:
            name, text = _LIMITS[kind]
            limit = context.get(name)
            return text.format(f"{limit:g}" if isinstance(limit, float) else limit)
        if kind in ("union_tag_not_found", "model_type", "model_attributes_type"):
            node, _ = self.find_node(path)
            options = [
                tag for m in (node.candidate_models(None, all_classes=True) if node else ()) for tag in type_tags(m)
            ]
            return f"a block with type: {_format_alternatives(options)}" if len(options) > 1 else "a block of keys"
        return _TYPES.get(kind.split("_")[0]) or detail["msg"].removeprefix("Input should be ")

    def explain_unknown_key(self, path: KeyPath, *, full: bool = False) -> str:
        """Explains why `path` is not a key, and suggests similar keys, as full paths if `full`."""
        parent, key = path[:-1], str(path[-1])
        node, value = self.find_node(parent)
        if node is None:
            return "unknown key"
        if path == ("include",):
            return "unknown key; a file can stand for the value of a key (data: !include data.yaml), not be merged"
        models = node.candidate_models(value)
        for model in models:
            lists = config_class_of(model)
            if key in lists.renamed_keys:
                return f"means the same as {lists.renamed_keys[key]}, which is set too; remove one of them"
            reason = lists.refused_keys.get(key)
            if reason is not None:
                return f"refused: {reason}"
        if is_secret_name(key):
            return SECRET_REFUSED
        other_types = _types_with_key(node, models, key)
        if models and other_types:
            chosen = "" if (*parent, "type") in self.document.values else " by default"
            actual = type_tags(models[0])[0]
            types = _format_alternatives(other_types)
            return f"a key of type {types}, but this block has type {actual!r}{chosen}; set its `type`"
        return f"unknown key{self._suggest_keys(path, models, full)}"

    @cached_property
    def _all_keys(self) -> list[tuple[str, str]]:
        """Every dotted key that is allowed in the document, with its last part."""
        keys = all_keys(ConfigNode.root(self.root), self.document.data)
        return [(name, name.rsplit(".", 1)[-1]) for name in keys]

    def _suggest_keys(self, path: KeyPath, models: Sequence[type[BaseModel]], full: bool) -> str:
        if not self.document.may_suggest():
            return ""
        parent, key = path[:-1], str(path[-1])
        prefix = f"{dotted_key(parent)}." if full and parent else ""
        siblings = list(dict.fromkeys(name for model in models for name in model.model_fields))
        namesakes = [name for name, last in self._all_keys if last == key]
        similar_keys = find_similar(key, [last for _, last in self._all_keys], strict=True)
        # The most likely first: misspelt here, the same key elsewhere, vaguely similar here, misspelt elsewhere.
        return (
            did_you_mean(key, siblings, prefix=prefix, strict=True)
            or format_suggestions(namesakes[:2])
            or did_you_mean(key, siblings, prefix=prefix)
            or format_suggestions([name for name, last in self._all_keys if last in similar_keys][:2])
            or (f"; there are {', '.join(siblings)}" if 0 < len(siblings) <= _MAX_LISTED else "")
        )

    def _report_validator_message(self, path: KeyPath, message: str) -> None:
        """Records a validator's message at the key that it names or mentions."""
        if path:
            message = message.removeprefix(f"{path[-1]}: ")
        node, value = self.find_node(path)
        # `keep: only the last entry may lack until` is about the key `keep` of this block.
        while (match := re.match(r"(\w+): ", message)) and match[1] in _declared_keys(node, value):
            path, message = (*path, match[1]), message[match.end() :]
            node, value = self.find_node(path)
        keys = {*_declared_keys(node, value), *(value if isinstance(value, dict) else ())}
        mentioned_paths = [(*path, word) for word in dict.fromkeys(re.findall(r"\w+", message)) if word in keys]
        written = [p for p in mentioned_paths if p in self.document.values]
        # If several keys conflict, reports the key from the command line.
        written.sort(key=lambda p: not self.document.values[p].is_override)
        origin = self.document.origin(written[0] if written else path)
        self.document.problems.append(Problem(origin, f"{dotted_key(path)}: {message}" if path else message))


def _declared_keys(node: ConfigNode | None, value: object) -> set[str]:
    """Returns the keys that the class of a block declares."""
    return {name for model in (node.candidate_models(value) if node else ()) for name in model.model_fields}


def _may_hold(value_type: ValueType, value: object) -> bool:
    if isinstance(value, dict):
        return value_type.kind in ("model", "mapping")
    if isinstance(value, list | tuple):
        return value_type.kind == "list"
    return value_type.kind == "scalar"


def _find_quoted(text: object) -> list[str]:
    return re.findall(r"'([^']*)'", str(text))


def _expected_options(detail: ErrorDetails) -> list[str]:
    return _find_quoted(detail.get("ctx", {}).get("expected")) if detail["type"] in ("literal_error", "enum") else []


def _format_alternatives(options: Sequence[str]) -> str:
    quoted = [repr(option) for option in options]
    return " or ".join(filter(None, [", ".join(quoted[:-1]), *quoted[-1:]]))


def _types_with_key(node: ConfigNode, models: Sequence[type[BaseModel]], key: str) -> list[str]:
    """Returns the types of the other union members that have `key`."""
    union_classes = node.candidate_models(None, all_classes=True)
    return [type_tags(m)[0] for m in union_classes if m not in models and key in m.model_fields and type_tags(m)]
