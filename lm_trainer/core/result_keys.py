"""Annotations of configuration fields: does a key affect the numerical results of a run?"""

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
    """Function from the value as plain data to the relevant part; None for an operational key, which has no effect."""


def _identity(value: Any) -> Any:
    return value


AffectsResults = Annotated[T, ResultEffect(_identity)]
"""A key affecting numerical results: a different value means a different run."""
Operational = Annotated[T, ResultEffect(None)]
"""A key that may change between attempts at a run, because no weight depends on it."""


def affects_results_through(part: Callable[[Any], Any]) -> ResultEffect:
    """Returns the annotation for a key of which only `part(value)` affects numerical results; for `Annotated`."""
    return ResultEffect(part)


def find_result_effect(config: type[Config], key: str) -> ResultEffect | None:
    """Returns the annotation of a field; None if it has none, and therefore counts as affecting results."""
    return next((m for m in config.model_fields[key].metadata if isinstance(m, ResultEffect)), None)


def select_result_values(config: Config, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys affecting numerical results, according to the annotations of the config's fields.

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
