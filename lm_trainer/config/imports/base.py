"""Dialects, which give the meaning of another framework's configuration keys in our configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Values = Mapping[str, Any]
"""The values of a foreign configuration by dotted key, including the defaults of its framework."""


Settings = Mapping[str, object]
"""Settings of our configuration by dotted key."""
Blocks = dict[str, Any]
"""Settings of our configuration as nested blocks."""


class NoEqualError(Exception):
    """A value has no equivalent. The message gives the reason, and `settings` are used instead."""

    def __init__(self, reason: str, settings: Settings | None = None):
        super().__init__(reason)
        self.settings = settings or {}


@dataclass(frozen=True)
class Unsupported:
    """A key that never has an equivalent, and the reason."""

    reason: str


@dataclass(frozen=True)
class Used:
    """A key that the rule of another key reads."""


Rule = str | Unsupported | Used | Callable[[Any, Values], Settings]
"""Our dotted key for the same value, or a function from the value and all values to our settings.

A function raises `NoEqualError` if there is no equivalent.
"""


@dataclass(frozen=True)
class Dialect:
    """A framework's configuration format, and its translation to ours."""

    name: str
    marks: frozenset[str]
    """Dotted keys by which the framework is recognised, because other frameworks do not have them."""
    keys: Mapping[str, Rule]
    """Rules by dotted key. A rule for a block applies to everything in the block."""
    defaults: Values | Callable[[Values], Values] = field(default_factory=dict)
    """The framework's default values that differ from ours, or a function that returns them for a file's values."""
    always: Settings = field(default_factory=dict)
    """Our settings that apply to every configuration of the framework."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Sentences on options of the framework's program for which another name is not enough, by option."""


USED = Used()
ALPACA = {
    "type": "supervised",
    "input_field": "instruction",
    "context_field": "input",
    "output_field": "output",
    "separate_with": "\n\n",
}
"""Our data format for records with Alpaca's fields."""
OUTPUT_PATHS = Unsupported(
    "where files go is said by trainer.log_dir and trainer.checkpointer.base_path; set them if the defaults do not suit"
)
DEVICES = Unsupported("all devices that are there are used; lmt launch starts several processes")
COMPILED = Unsupported("every step is compiled")
AUTOMATIC = Unsupported("nothing needs it: a run resumes from its newest checkpoint by itself")


def convert_precision(text: object) -> Settings:
    """Returns our precision policy for another framework's dtype name. Mixed bfloat16 keeps float32 weights."""
    name = str(text).lower().removeprefix("torch.")
    if name in ("bf16-mixed", "bfloat16", "bf16"):
        return {"trainer.mp": "p=f32,c=bfloat16"}
    if name in ("bf16-true",):
        return {"trainer.mp": "bfloat16"}
    if name in ("float32", "fp32", "32-true", "32"):
        return {"trainer.mp": "f32"}
    raise NoEqualError(f"{text}: losses are not scaled, so float16 would overflow; bfloat16 is there")


def flatten(block: object, prefix: str = "") -> dict[str, object]:
    """Flattens nested blocks to dotted keys. Lists and empty blocks are kept as values."""
    if not isinstance(block, dict) or not block:
        return {prefix.removesuffix("."): block}
    flattened: dict[str, object] = {}
    for key, value in block.items():
        flattened |= flatten(value, f"{prefix}{key}.")
    return flattened
