"""Marks on the fields of a configuration: whether a key decides the numbers of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from lm_trainer.core.config import Config

T = TypeVar("T")


@dataclass(frozen=True)
class ResultEffect:
    """The part of a key's value that decides the numbers of a run."""

    part: Callable[[Any], Any] | None
    """From the value as plain data to that part of it; None: nothing of it does, the key is operational."""


def _whole(value: Any) -> Any:
    return value


AffectsResults = Annotated[T, ResultEffect(_whole)]
"""A key that decides numbers: changed, it makes another run."""
Operational = Annotated[T, ResultEffect(None)]
"""A key that may change between two attempts at one run, because no weight depends on it."""


def result_part(part: Callable[[Any], Any]) -> ResultEffect:
    """The mark of a key of which only `part(value)` decides numbers; for `Annotated`."""
    return ResultEffect(part)


def effect_of(config: type[Config], key: str) -> ResultEffect | None:
    """The mark of a field; None where it has none, and so counts as one that decides numbers."""
    return next((m for m in config.model_fields[key].metadata if isinstance(m, ResultEffect)), None)


def result_values(config: Config, plain: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration that decide numbers, as far as its own fields say so.

    Args:
        config: says which.
        plain: its values as plain data.
    """
    kept = {}
    for key, value in plain.items():
        mark = effect_of(type(config), key) or ResultEffect(_whole)
        if mark.part is not None:
            kept[key] = mark.part(value)
    return kept
