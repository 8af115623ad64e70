"""Translates a foreign configuration into ours, and lists the keys that have no equivalent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from lm_trainer.config.config_node import ConfigNode, add_missing_types, value_at
from lm_trainer.config.document import Document, dotted_key
from lm_trainer.config.explain import Explainer
from lm_trainer.config.foreign import rename_foreign_keys
from lm_trainer.config.imports import DIALECTS
from lm_trainer.config.imports.base import Blocks, NoEqualError, Rule, Settings, Unsupported, Used, Values, flatten
from lm_trainer.config.imports.read import read_foreign
from lm_trainer.config.imports.recognise import find_dialect, find_rule, recognise_framework
from lm_trainer.core.config import Config
from lm_trainer.core.errors import UserError
from lm_trainer.core.terminal import escape_line


@dataclass(frozen=True)
class Translation:
    """The translated configuration as plain data, and the foreign keys that were lost."""

    dialect: str
    data: Blocks
    lost: tuple[tuple[str, str], ...]
    """The foreign keys that were lost, as (key, reason)."""

    @property
    def notes(self) -> list[str]:
        """The lost keys, with one line per reason."""
        keys: dict[str, list[str]] = {}
        for key, reason in self.lost:
            # Both may quote the foreign file, in which a line feed would end the comment.
            keys.setdefault(escape_line(reason), []).append(escape_line(key))
        return [f"{', '.join(foreign_keys)}: {reason}" for reason, foreign_keys in keys.items()]

    def to_yaml(self, source: str) -> str:
        """Returns the configuration as the text of a YAML file, with a list of lost keys at the top."""
        lines = [f"# From {escape_line(source)}, a configuration of {self.dialect}."]
        lines += ["# Not taken over:", *(f"#   {note}" for note in self.notes)] if self.lost else []
        return "\n".join(lines) + "\n" + yaml.safe_dump(self.data, sort_keys=False, allow_unicode=True)


def translate(file: Path, root: type[Config], name: str | None = None, *, processes: int | None = None) -> Translation:
    """Reads a configuration of another framework, and translates it to our keys.

    Args:
        file: path of a YAML, JSON, TOML or Python file. Python assignments are parsed, but not run.
        root: our configuration class.
        name: name of the framework; None recognises it by its keys.
        processes: number of devices that shared a batch, for frameworks whose files do not have it.

    Raises:
        UserError: if the file cannot be read, its framework is unclear, or it has no use for `processes`.
    """
    data, skipped = read_foreign(file)
    flattened = flatten(data)
    dialect = find_dialect(file, set(flattened), name, root)
    if processes is not None:
        if PROCESSES not in dialect.keys:
            raise UserError(f"--processes: the batch of {dialect.name} does not depend on it; leave it out")
        flattened[PROCESSES] = processes
    settings = dict(dialect.always)
    lost = [(line, "a value that only running the file tells") for line in skipped]
    # Unset keys have no effect.
    set_values = {key: value for key, value in flattened.items() if value is not None}
    assumed = dialect.defaults(set_values) if callable(dialect.defaults) else dialect.defaults
    values = {**assumed, **set_values}
    for key in values:
        rule_key, rule = find_rule(dialect, key)
        if isinstance(rule, Used):
            continue
        try:
            settings |= _apply_rule(rule, values if rule_key == "" else values[key], values)
        except NoEqualError as error:
            lost.append((key, str(error)))
            settings |= error.settings
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            lost.append((key, f"{values[key]!r} is none of the values that are known for it"))
    translated, refused = _split_lost_keys(_nest_settings(settings), root)
    if not _SOURCES & translated.get("data", {}).keys():
        lost.append(("training data", "none is known here; without data.train_urls a run reads Python's own sources"))
    return Translation(dialect.name, translated, tuple(dict.fromkeys([*lost, *refused])))


PROCESSES = "num_processes"
"""Key of accelerate's YAML with the number of devices that share a batch."""
_SOURCES = {"train_urls", "id", "source", "configs"}
"""Keys of `data` that select the training data."""


def explain_foreign_flag(flag: str) -> str | list[str]:
    """Returns our keys for an option name of other frameworks, in the order of the dialects, or a sentence if another
    name is not enough. Most names have no keys.
    """
    if (sentence := next((dialect.flags[flag] for dialect in DIALECTS if flag in dialect.flags), None)) is not None:
        return sentence
    rules = [dialect.keys.get(flag) for dialect in DIALECTS]
    return [*dict.fromkeys(rule for rule in rules if isinstance(rule, str))]


def detect_framework(file: Path, root: type[Config]) -> str | None:
    """Returns the framework of a file, recognised by its keys; None if unclear.

    Also returns None for Levanter, whose keys need no change.
    """
    try:
        keys = set(flatten(read_foreign(file)[0]))
    except UserError:
        return None
    return recognise_framework(file, keys, root)


def _apply_rule(rule: Rule | None, value: object, values: Values) -> Settings:
    if rule is None:
        raise NoEqualError("no key of ours is known for it")
    if isinstance(rule, Unsupported):
        raise NoEqualError(rule.reason)
    if isinstance(rule, str):
        return {rule: value}
    return {} if isinstance(rule, Used) else dict(rule(value, values))


def _nest_settings(settings: Settings) -> Blocks:
    """Nests dotted keys into blocks, with the sections in our usual order."""
    nested: Blocks = {}
    for key, value in settings.items():
        *parents, last = key.split(".")
        block = nested
        for parent in parents:
            block = block.setdefault(parent, {})
        block[last] = value
    order = ["initialize_from_hf", "use_hf_model_config", "model", "data", "trainer", "optimizer", "adapter"]
    return {key: nested[key] for key in sorted(nested, key=lambda key: order.index(key) if key in order else -1)}


def _split_lost_keys(data: Blocks, root: type[Config]) -> tuple[Blocks, list[tuple[str, str]]]:
    """Splits the data into our keys, in our spelling, and lost keys with the reasons."""
    document = Document()
    node = ConfigNode.root(root)
    rename_foreign_keys(node, data, (), document)
    document.data = add_missing_types(node, data)
    explainer = Explainer(document, root)
    lost = []
    for path in list(_iter_unknown_keys(node, data, ())):
        lost.append((dotted_key(path), explainer.explain_unknown_key(path).removeprefix("refused: ")))
        del value_at(data, path[:-1])[path[-1]]
    notes = [tuple(note.split(" ", 1)) for note in document.notes if "has no effect" in note]
    return data, [*((key, reason) for key, reason in notes), *lost]


def _iter_unknown_keys(node: ConfigNode, data: object, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Yields the paths of unknown keys."""
    if isinstance(data, list):
        for index, item in enumerate(data):
            yield from _iter_unknown_keys(node.child_or_undeclared(data, index), item, (*path, index))
    if not isinstance(data, dict) or (model := node.model_for(data)) is None:
        return
    for key, item in data.items():
        if key not in model.model_fields:
            yield (*path, key)
        else:
            yield from _iter_unknown_keys(node.child_or_undeclared(data, key), item, (*path, key))
