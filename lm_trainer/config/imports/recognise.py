"""Recognition of the framework that a configuration is of, by its keys."""

from __future__ import annotations

from collections.abc import Collection, Set
from pathlib import Path

from lm_trainer.config.imports import DIALECTS, Dialect
from lm_trainer.config.imports.base import Rule
from lm_trainer.core.config import Config
from lm_trainer.core.errors import UserError

_SHOWN = 6
"""Keys of each kind that a message names."""


def rule_for(dialect: Dialect, key: str) -> tuple[str, Rule | None]:
    """The rule for a key, or for the innermost block around it that has one."""
    while key and key not in dialect.keys:
        key = key.rpartition(".")[0]
    return key, dialect.keys.get(key)


def dialect_of(file: Path, keys: Set[str], name: str | None, root: type[Config]) -> Dialect:
    """Returns the dialect of a file.

    Args:
        file: its ending counts: Python is nanoGPT's alone.
        keys: the dotted keys in it.
        name: of the framework; None: by the keys.
        root: the class of our configuration, whose keys are Levanter's as well.

    Raises:
        UserError: when there is no such framework, or the keys do not tell for sure.
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
    known = _known(best, keys, root)
    # A single mark may be a coincidence, unless all else fits too.
    few = len(best.marks & keys) < 2 and file.suffix != ".py"
    if 2 * len(known) < len(keys) or (few and len(known) < len(keys)):
        raise UserError(
            f"{file}: {best.name} has {len(known)} of its {len(keys)} keys ({_some(known)}), and not the others "
            f"({_some(keys - known)}), so it may be of something else; say whose it is with --from NAME ({names})"
        )
    return best


def surely_of(file: Path, keys: Set[str], root: type[Config]) -> str | None:
    """The name of the framework of a file that has several of its marks; None for none, and for Levanter, whose keys
    are read as they are.
    """
    try:
        dialect = dialect_of(file, keys, None, root)
    except UserError:
        return None
    return dialect.name if dialect.name != "Levanter" and len(dialect.marks & keys) > 1 else None


def _known(dialect: Dialect, keys: Set[str], root: type[Config]) -> set[str]:
    """The keys that a framework has."""
    # A dialect with a rule for everything has our own keys.
    if "" in dialect.keys:
        return {key for key in keys if key.split(".")[0] in root.model_fields}
    return {key for key in keys if rule_for(dialect, key)[1] is not None}


def _is_marked(dialect: Dialect, keys: Set[str], candidates: Collection[Dialect], root: type[Config]) -> bool:
    """Returns True if a mark of the framework is among the keys, and a key that no other framework has."""
    shared = {key for other in candidates if other is not dialect for key in other.keys}
    return bool(dialect.marks & keys) and bool(_known(dialect, keys, root) - shared)


def _some(keys: Set[str]) -> str:
    shown = sorted(keys)[:_SHOWN]
    return ", ".join(shown) + (", ..." if len(keys) > _SHOWN else "")
