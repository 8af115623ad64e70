"""Recognises the framework of a configuration by its keys."""

from __future__ import annotations

from collections.abc import Collection, Set
from pathlib import Path

from lm_trainer.config.imports import DIALECTS, Dialect
from lm_trainer.config.imports.base import Rule
from lm_trainer.core.config import Config
from lm_trainer.core.errors import UserError

_SHOWN = 6
"""Maximum number of keys of each kind in a message."""


def find_rule(dialect: Dialect, key: str) -> tuple[str, Rule | None]:
    """Returns the rule for a key, or for the innermost enclosing block that has a rule."""
    while key and key not in dialect.keys:
        key = key.rpartition(".")[0]
    return key, dialect.keys.get(key)


def find_dialect(file: Path, keys: Set[str], name: str | None, root: type[Config]) -> Dialect:
    """Returns the dialect of a file.

    Args:
        file: path of the file. Its suffix matters, because only nanoGPT uses Python.
        keys: the dotted keys in the file.
        name: name of the framework; None recognises it by its keys.
        root: our configuration class, whose keys are also Levanter's keys.

    Raises:
        UserError: if the framework is unknown, or the keys are ambiguous.
    """
    names = ", ".join(dialect.name for dialect in DIALECTS)
    if name is not None:
        chosen = next((dialect for dialect in DIALECTS if dialect.name.lower() == name.lower()), None)
        if chosen is None:
            raise UserError(f"--from {name}: unknown; there are {names}")
        return chosen
    candidates = DIALECTS[:1] if file.suffix == ".py" else DIALECTS[1:]
    marked = [dialect for dialect in candidates if _is_marked(dialect, keys, candidates, root)]
    if not marked and file.suffix == ".py":
        raise UserError(
            f"{file}: no assignment at its top level is one of nanoGPT's. Python that builds a configuration, as "
            "torchtitan's registries do, is not run; write its settings as TOML, YAML or JSON"
        )
    if not marked:
        raise UserError(
            f"{file}: no key tells whose configuration it is ({names}; nanoGPT's are Python); say it with --from NAME"
        )
    best = max(marked, key=lambda dialect: len(dialect.marks & keys))
    matched = _supported_keys(best, keys, root)
    # A single mark may be a coincidence, unless all other keys also match.
    few = len(best.marks & keys) < 2 and file.suffix != ".py"
    if 3 * len(matched) < 2 * len(keys) or (few and len(matched) < len(keys)):
        raise UserError(
            f"{file}: {best.name} has {len(matched)} of its {len(keys)} keys ({_format_keys(matched)}), and not "
            f"the others ({_format_keys(keys - matched)}), so it may be of something else; say whose it is with --from "
            f"NAME ({names})"
        )
    return best


def recognise_framework(file: Path, keys: Set[str], root: type[Config]) -> str | None:
    """Returns the framework of a file that has several of its marks; None if unclear.

    Also returns None for Levanter, whose keys need no change.
    """
    try:
        dialect = find_dialect(file, keys, None, root)
    except UserError:
        return None
    return dialect.name if dialect.name != "Levanter" and len(dialect.marks & keys) > 1 else None


def _supported_keys(dialect: Dialect, keys: Set[str], root: type[Config]) -> set[str]:
    """Returns the keys that a framework supports."""
    # A dialect with a catch-all rule has the same keys as ours.
    if "" in dialect.keys:
        return {key for key in keys if key.split(".")[0] in root.model_fields}
    return {key for key in keys if find_rule(dialect, key)[1] is not None}


def _is_marked(dialect: Dialect, keys: Set[str], candidates: Collection[Dialect], root: type[Config]) -> bool:
    """Returns True if the keys include a mark of the framework, and a key that no other framework has."""
    shared = {key for other in candidates if other is not dialect for key in other.keys}
    return bool(dialect.marks & keys) and bool(_supported_keys(dialect, keys, root) - shared)


def _format_keys(keys: Set[str]) -> str:
    shown = sorted(keys)[:_SHOWN]
    return ", ".join(shown) + (", ..." if len(keys) > _SHOWN else "")
