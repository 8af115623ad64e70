"""Dialects: what the keys of another framework's configuration mean in ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Values = Mapping[str, Any]
"""The values of a foreign configuration by dotted key, its framework's own defaults among them."""


class NoEqualError(Exception):
    """A value has no equal here; the message is the reason, `settings` what takes its place."""

    def __init__(self, reason: str, settings: Mapping[str, Any] | None = None):
        super().__init__(reason)
        self.settings = settings or {}


@dataclass(frozen=True)
class Lost:
    """A key that has no equal here, whatever its value, and why."""

    reason: str


@dataclass(frozen=True)
class Used:
    """A key that the rule of another one reads."""


Rule = str | Lost | Used | Callable[[Any, Values], Mapping[str, Any]]
"""Our dotted key for the same value, or a function of the value and of all values to settings of ours.

A function raises `NoEqualError` where there are none.
"""


@dataclass(frozen=True)
class Dialect:
    """The configurations of one framework."""

    name: str
    marks: frozenset[str]
    """Dotted keys that these have and those of other frameworks have not."""
    keys: Mapping[str, Rule]
    """By dotted key; a rule for a block holds for the whole of it."""
    defaults: Values | Callable[[Values], Values] = field(default_factory=dict)
    """Values that the framework assumes where a file says nothing, as far as ours would assume others; or a function of
    what the file says."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Settings of ours that are so in every configuration of the framework."""


USED = Used()
ALPACA = {
    "type": "supervised",
    "input_field": "instruction",
    "context_field": "input",
    "output_field": "output",
    "separate_with": "\n\n",
}
"""Our format for records of Alpaca's layout."""
PLACE = Lost(
    "where files go is said by trainer.log_dir and trainer.checkpointer.base_path; set them if the defaults do not suit"
)
DEVICES = Lost("all devices that are there are used; lmt launch starts several processes")
COMPILED = Lost("every step is compiled")
AUTOMATIC = Lost("nothing needs it: a run resumes from its newest checkpoint by itself")


def precision(text: Any) -> dict[str, Any]:
    """Our policy for a dtype by the name that others give it; computation in bfloat16 keeps float32 weights."""
    name = str(text).lower().removeprefix("torch.")
    if name in ("bf16-mixed", "bfloat16", "bf16"):
        return {"trainer.mp": "p=f32,c=bfloat16"}
    if name in ("bf16-true",):
        return {"trainer.mp": "bfloat16"}
    if name in ("float32", "fp32", "32-true", "32"):
        return {"trainer.mp": "f32"}
    raise NoEqualError(f"{text}: losses are not scaled, so float16 would overflow; bfloat16 is there")


def flat(block: Any, prefix: str = "") -> dict[str, Any]:
    """The values of nested blocks by dotted key; lists and empty blocks stay whole."""
    if not isinstance(block, dict) or not block:
        return {prefix.removesuffix("."): block}
    found: dict[str, Any] = {}
    for key, value in block.items():
        found |= flat(value, f"{prefix}{key}.")
    return found
