"""Annotations of configuration fields that tell whether a key affects the numerical results of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from lm_trainer.core.config import Config

T = TypeVar("T")


@dataclass(frozen=True)
class ResultEffect:
    """The part of a key's value that affects the numerical results of a run."""

    part: Callable[[Any], Any] | None
    """Maps the value as plain data to the relevant part; None for an operational key, which has no effect."""


def _identity(value: Any) -> Any:
    return value


AffectsResults = Annotated[T, ResultEffect(_identity)]
"""A key that affects numerical results, so that a different value means a different run."""
Operational = Annotated[T, ResultEffect(None)]
"""A key that may change between attempts at a run, because no weight depends on it."""


def affects_results_through(part: Callable[[Any], Any]) -> ResultEffect:
    """Returns the annotation (for `Annotated`) of a key of which only `part(value)` affects numerical results."""
    return ResultEffect(part)


def find_result_effect(config: type[Config], key: str) -> ResultEffect | None:
    """Returns the annotation of a field; None if it has none. Such a field is considered to affect results, and so is a
    key of a section that accepts undeclared keys.
    """
    field = config.model_fields.get(key)
    return None if field is None else next((m for m in field.metadata if isinstance(m, ResultEffect)), None)


def select_result_values(config: Config, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys that affect numerical results, according to the annotations of the configuration's fields.

    Args:
        config: the configuration with the annotated fields.
        plain: its values as plain data.
    """
    values = {}
    for key, value in plain.items():
        effect = find_result_effect(type(config), key) or ResultEffect(_identity)
        if effect.part is not None:
            values[key] = effect.part(value)
    return values
