"""The scaling law L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, arXiv 2203.15556, equation 2)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

FLOPS_PER_PARAM = 6.0
"""Compute is 6 N D throughout, as in the scaling law literature."""


@dataclass(frozen=True)
class Law:
    """Constants of the law: numbers, or arrays of one shape for many laws at once.

    N counts parameters, D tokens, both in units of one.
    """

    E: Any
    A: Any
    B: Any
    alpha: Any
    beta: Any

    def loss(self, num_params: Any, tokens: Any) -> Any:
        """L(N, D) in the unit of the fitted loss; arguments broadcast against the constants."""
        return self.E + self.A * np.power(num_params, -self.alpha) + self.B * np.power(tokens, -self.beta)

    def optimum(self, flops: Any) -> tuple[Any, Any]:
        """N and D with the lowest loss for a compute C = 6 N D: N = G (C / 6)^(beta / (alpha + beta)), D = C / (6 N),
        with G = (alpha A / (beta B))^(1 / (alpha + beta)) (Hoffmann et al. 2022, equation 4).
        """
        # A law with A or B of 0 has no optimum: the result is then 0, infinite or NaN, which the caller checks.
        with np.errstate(divide="ignore", invalid="ignore"):
            exponents = self.alpha + self.beta
            # From dL/dN = 0 with D = C / (6 N): alpha A N^-alpha = beta B D^-beta.
            scale = np.power(self.alpha * self.A / (self.beta * self.B), 1 / exponents)
            num_params = scale * np.power(flops / FLOPS_PER_PARAM, self.beta / exponents)
            return num_params, flops / (FLOPS_PER_PARAM * num_params)

    def select(self, index: Any) -> Law:
        """Selects one or several laws by index."""
        return Law(*(getattr(self, field.name)[index] for field in fields(self)))

    def as_dict(self) -> dict[str, Any]:
        """Plain data with all digits."""
        return {field.name: np.asarray(getattr(self, field.name)).tolist() for field in fields(self)}


CONSTANTS = tuple(field.name for field in fields(Law))


def training_flops(num_params: Any, tokens: Any) -> Any:
    """C = 6 N D."""
    return FLOPS_PER_PARAM * num_params * tokens
