"""Computes the ratio of the numbers of tokens that two runs need to reach the same loss.

Shape letters: W is the number of windows of steps, R the number of resamplings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lm_trainer.report.run import ReportedRun

LOSS, TOKENS = "train/loss", "throughput/total_tokens"
_WINDOWS, _RESAMPLED = 40, 1000


@dataclass(frozen=True)
class TokenSavings:
    """Comparison of two runs at a loss that both of them reach."""

    loss: float
    """Training loss in nats per token: the higher one of the two final losses."""
    ratio: float
    """Number of tokens that the run needs to reach this loss, divided by the number that the other run needs."""
    compute: float | None
    """Number of FLOPs that the run needs to reach this loss, divided by the number that the other run needs; None if
    the FLOPs per token are unknown."""
    interval: tuple[float, float]
    """95 % interval of `ratio`, estimated from the noise of the loss within windows of steps."""


def compute_token_savings(run: ReportedRun, other: ReportedRun) -> TokenSavings | None:
    """Compares the numbers of tokens that two runs need to reach the same training loss; None without enough data.

    Each curve is averaged over windows of steps, which are evenly spaced in log tokens, and the standard error of each
    mean is computed. The target loss is the higher one of the two final losses. The point at which a curve reaches it
    is interpolated in log tokens. The interval comes from resampled curves, to which noise with these standard errors
    is added.
    """
    curves = [_average_windows(item) for item in (run, other)]
    if any(curve is None for curve in curves):
        return None
    (x_W, mean_W, error_W), (u_W, other_W, noise_W) = curves  # pyright: ignore[reportGeneralTypeIssues]
    loss = float(max(mean_W[-1], other_W[-1]))
    rng = np.random.default_rng(0)
    ratios_R = []
    for index in range(_RESAMPLED + 1):
        # The first iteration adds no noise.
        scale = float(index > 0)
        a = _log_tokens_to_reach(x_W, mean_W + scale * error_W * rng.standard_normal(len(x_W)), loss)
        b = _log_tokens_to_reach(u_W, other_W + scale * noise_W * rng.standard_normal(len(u_W)), loss)
        ratios_R.append(np.exp(a - b))
    low, high = np.quantile(ratios_R[1:], [0.025, 0.975])
    flops, other_flops = (item.facts.get("flops_per_token") for item in (run, other))
    compute = float(ratios_R[0]) * flops / other_flops if flops and other_flops else None
    return TokenSavings(loss, float(ratios_R[0]), compute, (float(low), float(high)))


def _average_windows(run: ReportedRun) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Returns the log tokens, mean losses and their standard errors, each of shape [W]; None without enough data."""
    if LOSS not in run.metrics or TOKENS not in run.metrics:
        return None
    (steps, losses), (token_steps, tokens) = run.metrics[LOSS], run.metrics[TOKENS]
    common, i, j = np.intersect1d(steps, token_steps, return_indices=True)
    losses, tokens = losses[i], tokens[j]
    good = np.isfinite(losses) & (tokens > 0)
    losses, tokens = losses[good], np.log(tokens[good])
    if len(common) < 2 * _WINDOWS or tokens[0] == tokens[-1]:
        return None
    edges = np.linspace(tokens[0], tokens[-1], _WINDOWS + 1)
    of = np.clip(np.searchsorted(edges, tokens, side="right") - 1, 0, _WINDOWS - 1)
    rows = []
    for window in range(_WINDOWS):
        values = losses[of == window]
        if len(values) >= 2:
            # The loss also decreases within a window, so the noise is estimated from the differences between adjacent
            # steps.
            noise = np.std(np.diff(values)) / np.sqrt(2)
            rows.append((np.mean(tokens[of == window]), np.mean(values), noise / np.sqrt(len(values))))
    x, mean, error = (np.array(column) for column in zip(*rows, strict=True))
    return x, mean, error


def _log_tokens_to_reach(x_W: np.ndarray, loss_W: np.ndarray, loss: float) -> float:
    """Returns the log tokens at which a curve first reaches a loss, after making the curve monotonic."""
    falling = np.minimum.accumulate(loss_W)
    if falling[-1] > loss:
        return float(x_W[-1])
    # np.interp requires increasing x values, so points with equal values are dropped.
    keep = np.concatenate([[True], np.diff(falling) < 0])
    return float(np.interp(-loss, -falling[keep], x_W[keep]))
