"""Choice of the way in which documents fill rows, where a configuration leaves it out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from lm_trainer.data.formats.base import FormatConfig

Packing = Literal["concat", "best_fit"]


def usual_packing(formats: Mapping[str, FormatConfig]) -> Packing | dict[str, Packing]:
    """Returns the packing for the formats of some sets, by the names of the sets where it is not the same for all.

    An answer whose prompt is in another row would be learnt as the answer to nothing, so these stay together. For text
    without prompts, rows without padding cost less than cuts.
    """
    chosen: dict[str, Packing] = {
        name: "best_fit" if format.is_answered else "concat" for name, format in formats.items()
    }
    return next(iter(chosen.values())) if len(set(chosen.values())) == 1 else chosen
