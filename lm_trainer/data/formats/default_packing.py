"""The default method of packing documents into rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from lm_trainer.data.formats.base import FormatConfig

Packing = Literal["concat", "best_fit"]


def choose_default_packing(formats: Mapping[str, FormatConfig]) -> Packing | dict[str, Packing]:
    """Returns the default packing of the given sets, as a mapping by set name if the sets differ.

    A prompt and its answer stay in one row, since the model could not learn from an answer without its prompt. For text
    without prompts, splitting documents costs less than padding rows.
    """
    chosen: dict[str, Packing] = {
        name: "best_fit" if format.has_prompts else "concat" for name, format in formats.items()
    }
    return next(iter(chosen.values())) if len(set(chosen.values())) == 1 else chosen
