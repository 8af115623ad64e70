"""A law of the best learning rate in the tokens of a run and of a batch."""

from __future__ import annotations

import math

from pydantic import PositiveFloat, model_validator

from lm_trainer.core.config import Config


class RateLaw(Config):
    """The best rate of a run of D tokens with a batch of B tokens is `learning_rate` (D / `tokens`)^`tokens_exponent`
    (B / `batch_size`)^`batch_exponent`. `lmt ladder rate` fits one.
    """

    learning_rate: PositiveFloat
    """The best peak learning rate of a run of `tokens` with a batch of `batch_size`."""
    tokens: PositiveFloat
    """Number of tokens of this run."""
    tokens_exponent: float = -0.32
    """Exponent of the number of tokens. The default was measured with AdamW (Bjorck et al. 2024, arXiv 2409.19913) and
    with Muon on weights of constant norm (HyperP, arXiv 2603.28743)."""
    batch_size: PositiveFloat | None = None
    """Number of tokens of a batch of this run. Required with `batch_exponent`."""
    batch_exponent: float = 0.0
    """Exponent of the batch size: 0.5 for the square-root rule of Adam (Malladi et al. 2022, arXiv 2205.10287)."""

    @model_validator(mode="after")
    def _check_batch_size_is_known(self) -> RateLaw:
        if self.batch_exponent and self.batch_size is None:
            raise ValueError(f"batch_exponent={self.batch_exponent:g} needs batch_size, the tokens of a batch")
        return self

    @property
    def reference(self) -> dict[str, float]:
        """Tokens and batch size at which the best rate is `learning_rate`, by the names of the keys."""
        return {"tokens": self.tokens, **({} if self.batch_size is None else {"batch_size": self.batch_size})}

    @property
    def exponents(self) -> dict[str, float]:
        """Exponents by the keys of `reference`."""
        return {"tokens": self.tokens_exponent, "batch_size": self.batch_exponent}

    def rate(self, tokens: float, batch_size: float) -> float:
        """Returns the best peak learning rate of a run of `tokens` with a batch of `batch_size` tokens."""
        numbers = {"tokens": tokens, "batch_size": batch_size}
        factors = ((numbers[name] / value) ** self.exponents[name] for name, value in self.reference.items())
        return self.learning_rate * math.prod(factors)
