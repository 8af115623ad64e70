"""Translation of a foreign configuration into one of ours, with what has no equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lm_trainer.config.document import Document, dotted
from lm_trainer.config.explain import Explainer
from lm_trainer.config.foreign import adopt
from lm_trainer.config.imports import DIALECTS, Dialect
from lm_trainer.config.imports.base import Lost, NoEqualError, Rule, Used, flat
from lm_trainer.config.imports.read import read_foreign
from lm_trainer.config.place import Place, complete
from lm_trainer.core.config import Config
from lm_trainer.core.errors import UserError


@dataclass(frozen=True)
class Translation:
    """A configuration of ours as plain data, and what of the foreign one is not in it."""

    dialect: str
    data: dict[str, Any]
    lost: tuple[tuple[str, str], ...]
    """(foreign key, reason)."""

    def to_yaml(self, source: str) -> str:
        """The configuration as a file, which lists at its top what has no equal."""
        lines = [f"# From {source}, a configuration of {self.dialect}."]
        lines += ["# Not taken over:", *(f"#   {key}: {reason}" for key, reason in self.lost)] if self.lost else []
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
    dialect = _dialect(file, set(found), name)
    settings = dict(dialect.always)
    lost = [(line, "a value that only running the file tells") for line in skipped]
    # What is unset there says nothing.
    values = {**dialect.defaults, **{key: value for key, value in found.items() if value is not None}}
    for key in values:
        rule_key, rule = _rule(dialect, key)
        if isinstance(rule, Used):
            continue
        try:
            settings |= _settings(rule, values if rule_key == "" else values[key], values)
        except NoEqualError as error:
            lost.append((key, str(error)))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            lost.append((key, f"{values[key]!r} is none of the values that are known for it"))
    ours, refused = _accepted(_nested(settings), root)
    return Translation(dialect.name, ours, tuple(dict.fromkeys([*lost, *refused])))


def _settings(rule: Rule | None, value: Any, values: dict[str, Any]) -> dict[str, Any]:
    if rule is None:
        raise NoEqualError("no key of ours is known for it")
    if isinstance(rule, Lost):
        raise NoEqualError(rule.reason)
    if isinstance(rule, str):
        return {rule: value}
    return {} if isinstance(rule, Used) else dict(rule(value, values))


def _rule(dialect: Dialect, key: str) -> tuple[str, Rule | None]:
    """The rule for a key, or for the innermost block around it that has one."""
    while key and key not in dialect.keys:
        key = key.rpartition(".")[0]
    return key, dialect.keys.get(key)


def _dialect(file: Path, keys: set[str], name: str | None) -> Dialect:
    names = ", ".join(each.name for each in DIALECTS)
    if name is not None:
        chosen = next((each for each in DIALECTS if each.name.lower() == name.lower()), None)
        if chosen is None:
            raise UserError(f"--from {name}: unknown; there are {names}")
        return chosen
    if file.suffix == ".py":
        return DIALECTS[0]
    most = max(DIALECTS, key=lambda each: len(each.marks & keys))
    if not most.marks & keys:
        raise UserError(f"{file}: no key tells whose configuration it is ({names}); say it with --from NAME")
    return most


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
    place = Place.root(root)
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


def _unknown(place: Place, data: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
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
