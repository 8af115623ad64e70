"""The scaling law L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, arXiv 2203.15556, equation 2)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

FLOPS_PER_PARAM = 6.0
"""FLOPs per parameter and token: compute is 6 N D everywhere, as in the scaling law literature."""


@dataclass(frozen=True)
class Law:
    """Constants of the law: numbers, or arrays of equal shape for many laws at once.

    N is the number of parameters, and D is the number of tokens.
    """

    E: Any
    A: Any
    B: Any
    alpha: Any
    beta: Any

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the constants."""
        return tuple(field.name for field in fields(self))

    def loss(self, num_params: Any, tokens: Any, unique_tokens: Any = None) -> Any:
        """Computes L(N, D) in the unit of the fitted loss. The arguments broadcast against the constants.

        Args:
            num_params: N.
            tokens: D.
            unique_tokens: number of distinct tokens among `tokens`; None if all are. Has an effect on a `RepeatLaw`
                only.
        """
        del unique_tokens
        return self.E + self.A * np.power(num_params, -self.alpha) + self.B * np.power(tokens, -self.beta)

    def optimum(self, flops: Any, unique_tokens: Any = None) -> tuple[Any, Any]:
        """Computes N and D with the lowest loss for a compute budget C = 6 N D: N = G (C / 6)^(beta / (alpha + beta))
        and D = C / (6 N), where G = (alpha A / (beta B))^(1 / (alpha + beta)) (Hoffmann et al. 2022, equation 4).
        """
        del unique_tokens
        # If A or B is 0, there is no optimum. The result is then 0, infinite or NaN, which the caller checks.
        with np.errstate(divide="ignore", invalid="ignore"):
            exponents = self.alpha + self.beta
            # From dL/dN = 0 with D = C / (6 N): alpha A N^-alpha = beta B D^-beta.
            scale = np.power(self.alpha * self.A / (self.beta * self.B), 1 / exponents)
            num_params = scale * np.power(flops / FLOPS_PER_PARAM, self.beta / exponents)
            return num_params, flops / (FLOPS_PER_PARAM * num_params)

    def select(self, index: Any) -> Law:
        """Selects one or several laws by index."""
        return type(self)(*(getattr(self, name)[index] for name in self.names))

    def as_dict(self) -> dict[str, Any]:
        """Returns the constants as plain data at full precision."""
        return {name: np.asarray(getattr(self, name)).tolist() for name in self.names}


CONSTANTS = tuple(field.name for field in fields(Law))


def training_flops(num_params: Any, tokens: Any) -> Any:
    """Computes C = 6 N D."""
    return FLOPS_PER_PARAM * num_params * tokens
