"""From a YAML file and overrides to a validated configuration, or to all that is wrong with it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from lm_trainer.config import overrides as overriding
from lm_trainer.config.document import Document, KeyPath
from lm_trainer.config.explain import Explainer
from lm_trainer.config.secret import REFUSAL, is_secret_name
from lm_trainer.config.shape import NoSuchKey, Place, tags
from lm_trainer.config.yaml_nodes import read_file
from lm_trainer.core.config import Config
from lm_trainer.core.errors import ConfigError, UserError

ConfigT = TypeVar("ConfigT", bound=Config)


@dataclass(frozen=True)
class Loaded(Generic[ConfigT]):
    """A validated configuration and where its values come from."""

    config: ConfigT
    data: dict[str, Any]
    """What was written, merged, as plain data; every block of a union has its `type`."""
    notes: tuple[str, ...]
    """What was done that the user may not expect, to be shown."""
    _document: Document

    def origin(self, key: str | KeyPath) -> str:
        """Where the value of a dotted key comes from: `file:line:column`, an override, or `default`."""
        path = tuple(int(p) if p.isdecimal() else p for p in key.split(".")) if isinstance(key, str) else key
        for length in range(len(path), 0, -1):
            origin = self._document.values.get(path[:length])
            if origin is not None:
                value = _get(self.data, path[:length])
                return "default" if length < len(path) and isinstance(value, dict) else origin.text
        return "default"


def load(path: Path, overrides: Sequence[str], root: type[ConfigT], *, options: Sequence[str] = ()) -> Loaded[ConfigT]:
    """Reads a configuration file, applies overrides and validates the result.

    Args:
        path: a YAML file; `!include` in it is relative to it.
        overrides: `key=value`, or `--key` and `value`; see `lm_trainer.config.overrides`.
        root: the class of the whole configuration.
        options: options of the command, suggested for a misspelt one among the overrides.

    Raises:
        ConfigError: with every problem of the files and the overrides, in their order.
    """
    document = read_file(path)
    if document.data is None:
        raise ConfigError(document.lines())
    place = Place.root(root)
    document.data = complete(place, document.data)
    given = overriding.parse(overrides, document, root, options)
    overriding.apply(given, document, root)
    document.data = complete(place, document.data)
    _check(place, document.data, (), document)
    config = _validate(document, root)
    if config is None or document.problems:
        raise ConfigError(document.lines())
    return Loaded(config, document.data, tuple(document.notes), document)


def _validate(document: Document, root: type[ConfigT]) -> ConfigT | None:
    try:
        return root.model_validate(copy.deepcopy(document.data))
    except ValidationError as error:
        Explainer(document, root).explain(error)
    except UserError as error:
        document.report((), str(error))
    return None


def complete(place: Place, value: Any) -> Any:
    """The same data, with the `type` of every block of a union that has none, and `{}` for a block left empty."""
    block = place.shape.choice("model")
    if value is None and block is not None and not place.shape.nullable and not place.shape.alternatives:
        value = {}
    if isinstance(value, list):
        return [complete(_step(place, value, index), item) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    default = place.default_model()
    if default is not None and "type" not in value and tags(default):
        value = {"type": tags(default)[0], **value}
    return {key: complete(_step(place, value, key), item) for key, item in value.items()}


def _step(place: Place, value: Any, key: str | int) -> Place:
    try:
        return place.step(value, key)
    except NoSuchKey:
        return Place.nowhere()


def _check(place: Place, value: Any, path: KeyPath, document: Document) -> None:
    """Refuses what pydantic would take: keys that name a secret and are no declared ones, and `true` as a number."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check(_step(place, value, index), item, (*path, index), document)
    elif isinstance(value, dict):
        known = {name for model in place.models(value) for name in (*model.model_fields, *_refused(model))}
        for key, item in value.items():
            if key not in known and is_secret_name(key):
                document.report((*path, key), REFUSAL, at_key=True)
                document.unreadable.add((*path, key))
            else:
                _check(_step(place, value, key), item, (*path, key), document)
    elif isinstance(value, bool) and place.shape.is_number() and not document.is_unreadable(path):
        document.report(path, f"expected a number, got {str(value).lower()}")
        document.unreadable.add(path)


def _refused(model: Any) -> Sequence[str]:
    return tuple(model.refused_keys) if issubclass(model, Config) else ()


def _get(data: Any, path: KeyPath) -> Any:
    for key in path:
        data = data[key]
    return data
