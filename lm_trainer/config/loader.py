"""Loads a validated configuration from a YAML file and overrides, or reports a list of all errors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, JsonValue, ValidationError

from lm_trainer.config import overrides as overriding
from lm_trainer.config.config_node import ConfigNode, add_missing_types, value_at
from lm_trainer.config.document import Document, KeyPath
from lm_trainer.config.explain import SECRET_REFUSED, Explainer
from lm_trainer.config.foreign import config_class_of, rename_foreign_keys
from lm_trainer.config.yaml_nodes import read_file
from lm_trainer.core.config import Config
from lm_trainer.core.credentials import is_secret_name
from lm_trainer.core.errors import ConfigError, UserError

ConfigT = TypeVar("ConfigT", bound=Config)


@dataclass(frozen=True)
class LoadedConfig(Generic[ConfigT]):
    """A validated configuration with the origins of its values."""

    config: ConfigT
    data: dict[str, JsonValue]
    """The files and the overrides as plain data. Every block of a union has its `type`."""
    notes: tuple[str, ...]
    """Notes to the user on unexpected effects of keys and overrides."""
    _document: Document

    def origin(self, key: str | KeyPath) -> str:
        """Returns the origin of the value of a dotted key: `file:line:column`, an override, or `default`."""
        path = tuple(int(p) if p.isdecimal() else p for p in key.split(".")) if isinstance(key, str) else key
        # A value without a position was written as part of the nearest ancestor that has a position. If the ancestor is
        # a mapping, however, the key was added by default.
        for length in range(len(path), 0, -1):
            origin = self._document.values.get(path[:length])
            if origin is not None:
                value = value_at(self.data, path[:length])
                return "default" if length < len(path) and isinstance(value, dict) else origin.text
        return "default"


def load(
    path: str | Path,
    overrides: Sequence[str],
    root: type[ConfigT],
    *,
    options: Sequence[str] = (),
    foreign: Callable[[str], str | Sequence[str]] | None = None,
) -> LoadedConfig[ConfigT]:
    """Reads a configuration file, applies overrides and validates the result.

    Args:
        path: path of a YAML file. Paths after `!include` are relative to it.
        overrides: words of the form `key=value`, or `--key` and `value`. See `lm_trainer.config.overrides`.
        root: the class of the whole configuration.
        options: options of the command, which are suggested for misspelt options among the overrides.
        foreign: returns our keys for an option name of other frameworks, which are suggested for unknown options, or a
            sentence if another name is not enough.

    Raises:
        ConfigError: if there are problems; lists all problems of the files and overrides, in order.
    """
    document = read_file(Path(path))
    if document.data is None:
        raise ConfigError(document.problem_lines())
    node = ConfigNode.root(root)
    rename_foreign_keys(node, document.data, (), document)
    # Done before overrides are applied, because they determine the class of a block by its `type`.
    document.data = add_missing_types(node, document.data)
    parsed = overriding.parse_overrides(overrides, document, root, overriding.Suggestions(options, foreign))
    overriding.apply_overrides(parsed, document, root)
    _check_values(node, document.data, (), document)
    config = _validate(document, root)
    if config is None or document.problems:
        raise ConfigError(document.problem_lines())
    return LoadedConfig(config, document.data, tuple(document.notes), document)


def _validate(document: Document, root: type[ConfigT]) -> ConfigT | None:
    try:
        # Validates a copy, because validators may modify their input.
        return root.model_validate(copy.deepcopy(document.data))
    except ValidationError as error:
        Explainer(document, root).report_errors(error)
    except UserError as error:
        document.add_problem((), str(error))
    return None


def _check_values(node: ConfigNode, value: object, path: KeyPath, document: Document) -> None:
    """Reports values that pydantic would wrongly accept: undeclared keys that name a secret, and `true` as a number."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check_values(node.child_or_undeclared(value, index), item, (*path, index), document)
    elif isinstance(value, dict):
        declared = {
            name for model in node.candidate_models(value) for name in (*model.model_fields, *_foreign_keys(model))
        }
        for key, item in value.items():
            if key not in declared and node.value_type.may_hold_secrets() and is_secret_name(key):
                # Checks only the name, and marks the value as unreadable, so that it is never shown.
                document.add_problem((*path, key), SECRET_REFUSED, at_key=True)
                document.unreadable.add((*path, key))
            else:
                _check_values(node.child_or_undeclared(value, key), item, (*path, key), document)
    elif isinstance(value, bool) and node.value_type.is_number() and not document.is_unreadable(path):
        document.add_problem(path, f"expected a number, got {str(value).lower()}")
        document.unreadable.add(path)


def _foreign_keys(model: type[BaseModel]) -> Sequence[str]:
    lists = config_class_of(model)
    return (*lists.refused_keys, *lists.ignored_keys, *lists.renamed_keys)
