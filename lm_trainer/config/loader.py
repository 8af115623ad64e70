"""Loader: from a YAML file and overrides to a validated configuration, or to a list of all its faults."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from lm_trainer.config import overrides as overriding
from lm_trainer.config.config_node import ConfigNode, complete
from lm_trainer.config.document import Document, KeyPath
from lm_trainer.config.explain import SECRET_REFUSED, Explainer
from lm_trainer.config.foreign import adopt, lists_of
from lm_trainer.config.yaml_nodes import read_file
from lm_trainer.core.config import Config
from lm_trainer.core.credentials import is_secret_name
from lm_trainer.core.errors import ConfigError, UserError

ConfigT = TypeVar("ConfigT", bound=Config)


@dataclass(frozen=True)
class Loaded(Generic[ConfigT]):
    """A validated configuration and the origins of its values."""

    config: ConfigT
    data: dict[str, Any]
    """The files and the overrides as plain data; every block of a union has its `type`."""
    notes: tuple[str, ...]
    """Effects of keys and overrides that the user may not expect, to be shown."""
    _document: Document

    def origin(self, key: str | KeyPath) -> str:
        """The origin of the value of a dotted key: `file:line:column`, an override, or `default`."""
        path = tuple(int(p) if p.isdecimal() else p for p in key.split(".")) if isinstance(key, str) else key
        # A value without a position of its own was written as part of the nearest block that has one, unless that
        # block is a mapping: then the key was added by default.
        for length in range(len(path), 0, -1):
            origin = self._document.values.get(path[:length])
            if origin is not None:
                value = _get(self.data, path[:length])
                return "default" if length < len(path) and isinstance(value, dict) else origin.text
        return "default"


def load(
    path: Path,
    overrides: Sequence[str],
    root: type[ConfigT],
    *,
    options: Sequence[str] = (),
    foreign: Callable[[str], Sequence[str]] | None = None,
) -> Loaded[ConfigT]:
    """Reads a configuration file, applies overrides and validates the result.

    Args:
        path: a YAML file; `!include` in it is relative to it.
        overrides: `key=value`, or `--key` and `value`; see `lm_trainer.config.overrides`.
        root: the class of the whole configuration.
        options: options of the command, suggested for a misspelt one among the overrides.
        foreign: the keys of ours for a setting that other frameworks name so; suggested for an unknown option.

    Raises:
        ConfigError: with every problem of the files and the overrides, in their order.
    """
    document = read_file(path)
    if document.data is None:
        raise ConfigError(document.lines())
    place = ConfigNode.root(root)
    adopt(place, document.data, (), document)
    # Before the overrides, which find the class of a block by its `type`.
    document.data = complete(place, document.data)
    given = overriding.parse(overrides, document, root, overriding.Suggestions(options, foreign))
    overriding.apply(given, document, root)
    _check(place, document.data, (), document)
    config = _validate(document, root)
    if config is None or document.problems:
        raise ConfigError(document.lines())
    return Loaded(config, document.data, tuple(document.notes), document)


def _validate(document: Document, root: type[ConfigT]) -> ConfigT | None:
    try:
        # A copy, because validators may change what they are given.
        return root.model_validate(copy.deepcopy(document.data))
    except ValidationError as error:
        Explainer(document, root).explain(error)
    except UserError as error:
        document.report((), str(error))
    return None


def _check(place: ConfigNode, value: Any, path: KeyPath, document: Document) -> None:
    """Reports values that pydantic would take: undeclared keys that name a secret, and `true` as a number."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check(place.step_or_nowhere(value, index), item, (*path, index), document)
    elif isinstance(value, dict):
        known = {name for model in place.models(value) for name in (*model.model_fields, *_foreign_keys(model))}
        for key, item in value.items():
            if key not in known and place.shape.may_hold_secrets() and is_secret_name(key):
                # By its name alone, so that the value is shown nowhere, whatever else is wrong with it.
                document.report((*path, key), SECRET_REFUSED, at_key=True)
                document.unreadable.add((*path, key))
            else:
                _check(place.step_or_nowhere(value, key), item, (*path, key), document)
    elif isinstance(value, bool) and place.shape.is_number() and not document.is_unreadable(path):
        document.report(path, f"expected a number, got {str(value).lower()}")
        document.unreadable.add(path)


def _foreign_keys(model: Any) -> Sequence[str]:
    lists = lists_of(model)
    return (*lists.refused_keys, *lists.ignored_keys, *lists.renamed_keys)


def _get(data: Any, path: KeyPath) -> Any:
    for key in path:
        data = data[key]
    return data
