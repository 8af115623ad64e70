"""Compares the losses of two runs at equal numbers of tokens.

Shape letters: N common points, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lm_trainer.report.run import ReportedRun
from lm_trainer.report.saved import LOSS, TOKENS

_BLOCKS = 10
_T_95 = 2.262
"""0.975 quantile of Student's t distribution with `_BLOCKS` - 1 degrees of freedom."""


@dataclass(frozen=True)
class LossDifference:
    """The difference of the training losses of two runs."""

    mean: float
    """Mean of the first loss minus the second loss, in nats per token."""
    interval: tuple[float, float]
    """95 % interval of `mean` by the method of batch means (Law and Carson 1979): the mean of consecutive blocks of
    points, with Student's t. It covers the noise along the runs, not the choice of their seed."""
    points: int
    """Number of pairs of losses at equal tokens."""
    tokens: tuple[int, int]
    """Number of tokens at the first and the last pair."""


def compute_loss_difference(run: ReportedRun, other: ReportedRun, after: int) -> LossDifference | None:
    """Compares the training losses after a step over the last half of the tokens that both runs have.

    Args:
        run: the first run.
        other: the second run.
        after: number of steps that are shared, and not compared.

    Returns:
        The difference; None if both runs have too few points at equal numbers of tokens.
    """
    tokens_N, losses, other_losses = _pair_by_tokens(run, other, after)
    # Losses directly after a change are not yet a property of the changed run.
    late = tokens_N > (tokens_N[0] + tokens_N[-1]) / 2 if len(tokens_N) else np.zeros(0, bool)
    differences_N = (losses - other_losses)[late]
    if len(differences_N) < 2 * _BLOCKS:
        return None
    means_B = np.array([block.mean() for block in np.array_split(differences_N, _BLOCKS)])
    mean, error = float(differences_N.mean()), _T_95 * float(means_B.std(ddof=1)) / np.sqrt(_BLOCKS)
    compared = tokens_N[late]
    span = (int(compared[0]), int(compared[-1]))
    return LossDifference(mean, (mean - error, mean + error), len(differences_N), span)


def _pair_by_tokens(run: ReportedRun, other: ReportedRun, after: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the common numbers of tokens and the losses of both runs there, each of shape [N]."""
    (x, a), (y, b) = (_losses_by_tokens(item, after) for item in (run, other))
    common, i, j = np.intersect1d(x, y, return_indices=True)
    finite = np.isfinite(a[i]) & np.isfinite(b[j])
    return common[finite], a[i][finite], b[j][finite]


def _losses_by_tokens(run: ReportedRun, after: int) -> tuple[np.ndarray, np.ndarray]:
    empty = np.zeros(0, np.int64), np.zeros(0)
    (steps, losses), (token_steps, tokens) = run.metrics.get(LOSS, empty), run.metrics.get(TOKENS, empty)
    common, i, j = np.intersect1d(steps, token_steps, return_indices=True)
    later = common > after
    return tokens[j][later], losses[i][later]
