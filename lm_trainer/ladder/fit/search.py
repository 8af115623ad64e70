"""Finds the law with the least errors, after a check that the points determine one."""

from __future__ import annotations

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.huber import fit_huber
from lm_trainer.ladder.fit.law import Law
from lm_trainer.ladder.fit.points import Points
from lm_trainer.ladder.fit.repeats import make_design
from lm_trainer.ladder.fit.settings import NUM_CONSTANTS, FitSettings
from lm_trainer.ladder.fit.solver import fit_by_variable_projection

_FEWEST_SIZES = 3
"""Minimum number of different values of N, and of D: each has a factor and an exponent, and there is a constant."""
_FEWEST_REPEATED = 2
"""Minimum number of different repetitions for R*."""


def search_law(points: Points, settings: FitSettings) -> Law:
    """Returns the law with the least errors by the method of the settings.

    Raises:
        UserError: if the points do not determine a law.
    """
    _check_points(points)
    if settings.method == "huber":
        law = fit_huber(points, settings.start)
    else:
        design = make_design(points)
        law = design.to_law(fit_by_variable_projection(design, points.loss))
    # Plain floats, as in JSON, so that a fit has the same digest after it is saved and read.
    return type(law)(*(float(getattr(law, name)) for name in law.names))


def _check_points(points: Points) -> None:
    source, sizes, lengths = points.source or "the points", len(points.sizes), len(np.unique(points.tokens))
    label = f"{source}: {len(points)} points of {sizes} sizes"
    constants = NUM_CONSTANTS + (points.unique_tokens is not None)
    if len(points) <= constants:
        raise UserError(f"{label} do not determine {constants} constants; it takes {constants + 1} points, better 12")
    if sizes < _FEWEST_SIZES:
        raise UserError(
            f"{label}: E, A and alpha cannot be told apart with fewer than {_FEWEST_SIZES}; train another size"
        )
    if lengths < _FEWEST_SIZES:
        raise UserError(f"{label} and {lengths} lengths: E, B and beta cannot be told apart; raise chinchilla_multiple")
    # If D / N is the same for all points, the effects of N and D cannot be separated.
    spread = np.log(points.tokens / points.num_params)
    if np.ptp(spread) < 0.05:
        raise UserError(
            f"{label} all have about {np.exp(spread.mean()):.3g} tokens per parameter, so that the effects of size and "
            "length cannot be told apart; raise chinchilla_multiple"
        )
    if points.unique_tokens is not None:
        _check_repeats(points.tokens / points.unique_tokens, label)


def _check_repeats(passes: np.ndarray, label: str) -> None:
    if len(np.unique(passes[passes > 1])) < _FEWEST_REPEATED:
        raise UserError(
            f"{label} have at most {passes.max():.3g} passes over their text, too few to show what repeated text is "
            f"worth; train {_FEWEST_REPEATED} points past one pass, better past 4, or fit without unique tokens"
        )
