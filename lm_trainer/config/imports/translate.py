"""Translation of a foreign configuration into one of ours, with what has no equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lm_trainer.config.config_node import ConfigNode, complete
from lm_trainer.config.document import Document, dotted
from lm_trainer.config.explain import Explainer
from lm_trainer.config.foreign import adopt
from lm_trainer.config.imports import DIALECTS
from lm_trainer.config.imports.base import Lost, NoEqualError, Rule, Used, flat
from lm_trainer.config.imports.read import read_foreign
from lm_trainer.config.imports.recognise import dialect_of, rule_for, surely_of
from lm_trainer.core.config import Config
from lm_trainer.core.errors import UserError
from lm_trainer.core.terminal import one_line


@dataclass(frozen=True)
class Translation:
    """A configuration of ours as plain data, and what of the foreign one is not in it."""

    dialect: str
    data: dict[str, Any]
    lost: tuple[tuple[str, str], ...]
    """(foreign key, reason)."""

    @property
    def notes(self) -> list[str]:
        """Keys that are not in it, a line for each reason."""
        keys: dict[str, list[str]] = {}
        for key, reason in self.lost:
            # Both may quote the foreign file, in which a line feed would end the comment.
            keys.setdefault(one_line(reason), []).append(one_line(key))
        return [f"{', '.join(those)}: {reason}" for reason, those in keys.items()]

    def to_yaml(self, source: str) -> str:
        """The configuration as a file, which lists at its top what has no equal."""
        lines = [f"# From {one_line(source)}, a configuration of {self.dialect}."]
        lines += ["# Not taken over:", *(f"#   {note}" for note in self.notes)] if self.lost else []
        return "\n".join(lines) + "\n" + yaml.safe_dump(self.data, sort_keys=False, allow_unicode=True)


def translate(file: Path, root: type[Config], name: str | None = None) -> Translation:
    """Reads a configuration of another framework, and writes what it says in our keys.

    Args:
        file: YAML, JSON, TOML or Python assignments, which are not run.
        root: the class of our configuration.
        name: of the framework; None: by the keys.

    Raises:
        UserError: when the file cannot be read, or it is not clear whose it is.
    """
    data, skipped = read_foreign(file)
    found = flat(data)
    dialect = dialect_of(file, set(found), name, root)
    settings = dict(dialect.always)
    lost = [(line, "a value that only running the file tells") for line in skipped]
    # What is unset there says nothing.
    given = {key: value for key, value in found.items() if value is not None}
    assumed = dialect.defaults(given) if callable(dialect.defaults) else dialect.defaults
    values = {**assumed, **given}
    for key in values:
        rule_key, rule = rule_for(dialect, key)
        if isinstance(rule, Used):
            continue
        try:
            settings |= _settings(rule, values if rule_key == "" else values[key], values)
        except NoEqualError as error:
            lost.append((key, str(error)))
            settings |= error.settings
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            lost.append((key, f"{values[key]!r} is none of the values that are known for it"))
    ours, refused = _accepted(_nested(settings), root)
    if not _SOURCES & ours.get("data", {}).keys():
        lost.append(("training data", "none is known here; without data.train_urls a run reads Python's own sources"))
    return Translation(dialect.name, ours, tuple(dict.fromkeys([*lost, *refused])))


_SOURCES = {"train_urls", "id", "source", "configs"}
"""Keys of `data` that say what is trained on."""


def foreign_settings(key: str) -> list[str]:
    """Keys of ours for a key that other frameworks name so, in the order of the dialects; most keys have none."""
    rules = [dialect.keys.get(key) for dialect in DIALECTS]
    return [*dict.fromkeys(rule for rule in rules if isinstance(rule, str))]


def foreign_dialect(file: Path, root: type[Config]) -> str | None:
    """The framework of a file, by its keys; None for none, and for Levanter, whose keys are read as they are."""
    try:
        keys = set(flat(read_foreign(file)[0]))
    except UserError:
        return None
    return surely_of(file, keys, root)


def _settings(rule: Rule | None, value: Any, values: dict[str, Any]) -> dict[str, Any]:
    if rule is None:
        raise NoEqualError("no key of ours is known for it")
    if isinstance(rule, Lost):
        raise NoEqualError(rule.reason)
    if isinstance(rule, str):
        return {rule: value}
    return {} if isinstance(rule, Used) else dict(rule(value, values))


def _nested(settings: dict[str, Any]) -> dict[str, Any]:
    """Blocks for dotted keys, with the sections in the order in which ours are read."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        *parents, last = key.split(".")
        block = found
        for parent in parents:
            block = block.setdefault(parent, {})
        block[last] = value
    order = ["initialize_from_hf", "use_hf_model_config", "model", "data", "trainer", "optimizer", "adapter"]
    return {key: found[key] for key in sorted(found, key=lambda key: order.index(key) if key in order else -1)}


def _accepted(data: dict[str, Any], root: type[Config]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The part of the data that are keys of ours, in our words, and the rest with reasons."""
    document = Document()
    place = ConfigNode.root(root)
    adopt(place, data, (), document)
    document.data = complete(place, data)
    explainer = Explainer(document, root)
    lost = []
    for path in list(_unknown(place, data, ())):
        lost.append((dotted(path), explainer.unknown_key(path).removeprefix("refused: ")))
        holder: Any = data
        for key in path[:-1]:
            holder = holder[key]
        del holder[path[-1]]
    notes = [tuple(note.split(" ", 1)) for note in document.notes if "has no effect" in note]
    return data, [*((key, reason) for key, reason in notes), *lost]


def _unknown(place: ConfigNode, data: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Yields the paths of keys that there are not here."""
    if isinstance(data, list):
        for index, item in enumerate(data):
            yield from _unknown(place.step_or_nowhere(data, index), item, (*path, index))
    if not isinstance(data, dict) or (model := place.model_for(data)) is None:
        return
    for key, item in data.items():
        if key not in model.model_fields:
            yield (*path, key)
        else:
            yield from _unknown(place.step_or_nowhere(data, key), item, (*path, key))
