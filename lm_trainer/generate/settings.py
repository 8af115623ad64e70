"""Settings of generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax.typing import DTypeLike


@dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """Settings of `generate`: the end of a continuation, and the choice of its tokens."""

    max_new_tokens: int
    """The longest continuation."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_k: int = 0
    """Draw from so many of the likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens whose probabilities reach this; order as in `filter_logits`."""
    eos_id: int | None = None
    """Ends a continuation; None: nothing does."""
    seed: int = 0
    """Of the draws."""
    dtype: DTypeLike = "float32"
    """Of the computation, and of the cache."""
