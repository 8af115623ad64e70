"""Writes a configuration as YAML, from which `load` reads an equal configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeGuard

from lm_trainer.config.document import KeyPath
from lm_trainer.config.yaml_syntax import to_flow_yaml
from lm_trainer.core.config import Config
from lm_trainer.core.credentials import without_credentials
from lm_trainer.core.terminal import escape_line

_COMMENT_COLUMN = 60
"""Column at which comments are aligned. Longer lines push their comments to the right."""


def to_yaml(config: Config, comment: Callable[[KeyPath], str] | None = None, *, redact: bool = False) -> str:
    """Writes all values of a configuration, including defaults.

    Args:
        config: any configuration.
        comment: returns the comment to write after the value at a path, for example its origin.
        redact: True to blank credentials in URLs and commands, for output that others may read.
    """
    plain = config.model_dump(mode="json")
    plain = without_credentials(plain) if redact else plain
    lines = [
        (text, escape_line(comment(path)) if comment and path else "") for text, path in _iter_block_lines(plain, ())
    ]
    width = min(max((len(text) for text, note in lines if note), default=0), _COMMENT_COLUMN)
    return "".join(f"{text.ljust(width)}  # {note}\n" if note else f"{text}\n" for text, note in lines)


def _iter_block_lines(value: Mapping[str, object] | list[object], path: KeyPath) -> Iterator[tuple[str, KeyPath]]:
    """Yields the lines of a non-empty block or list, each with the path of its leaf, or () if it has no leaf."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, item in items:
        lead = f"{to_flow_yaml(key)}:" if isinstance(value, Mapping) else "-"
        item_path = (*path, key)
        if not _is_nested(item):
            yield f"{lead} {to_flow_yaml(item)}", item_path
            continue
        # In a list, the first line of a block follows the dash.
        inner = [(f"  {text}", leaf) for text, leaf in _iter_block_lines(item, item_path)]
        if isinstance(value, Mapping):
            yield lead, ()
            yield from inner
        else:
            yield f"- {inner[0][0][2:]}", inner[0][1]
            yield from inner[1:]


def _is_nested(value: object) -> TypeGuard[Mapping[str, object] | list[object]]:
    """Returns True if a value is written on separate lines, which holds for a block and for a list of blocks."""
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value)
