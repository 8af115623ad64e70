"""Tokens that one run needs less than another for the same loss.

Shape letters: W windows of steps, R resamplings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lm_trainer.report.run import ReportedRun

LOSS, TOKENS = "train/loss", "throughput/total_tokens"
_WINDOWS, _RESAMPLED = 40, 1000


@dataclass(frozen=True)
class Saved:
    """The comparison of two runs at the loss that both reach."""

    loss: float
    """Training loss in nats per token: the higher one of the two at their ends."""
    ratio: float
    """Tokens of the run over those of the other at that loss."""
    compute: float | None
    """FLOPs of the run over those of the other at that loss; None where the FLOPs of a token are not known."""
    interval: tuple[float, float]
    """95 % of the ratios, by the noise of the loss within windows of steps."""


def tokens_saved(run: ReportedRun, other: ReportedRun) -> Saved | None:
    """Compares the tokens that two runs need for the same training loss; None where they do not tell.

    Each curve becomes means over windows of steps, evenly spaced in the logarithm of tokens, with the standard errors
    of these means. The loss to reach is the higher of the two at the ends; where a curve comes down to it is
    interpolated in log tokens. The interval is of curves with noise of these errors.
    """
    curves = [_windows(each) for each in (run, other)]
    if any(curve is None for curve in curves):
        return None
    (x_W, mean_W, error_W), (u_W, other_W, noise_W) = curves  # pyright: ignore[reportGeneralTypeIssues]
    loss = float(max(mean_W[-1], other_W[-1]))
    rng = np.random.default_rng(0)
    ratios_R = []
    for index in range(_RESAMPLED + 1):
        # The first one is without noise.
        scale = float(index > 0)
        a = _reach(x_W, mean_W + scale * error_W * rng.standard_normal(len(x_W)), loss)
        b = _reach(u_W, other_W + scale * noise_W * rng.standard_normal(len(u_W)), loss)
        ratios_R.append(np.exp(a - b))
    low, high = np.quantile(ratios_R[1:], [0.025, 0.975])
    flops, others = (each.facts.get("flops_per_token") for each in (run, other))
    compute = float(ratios_R[0]) * flops / others if flops and others else None
    return Saved(loss, float(ratios_R[0]), compute, (float(low), float(high)))


def _windows(run: ReportedRun) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Log tokens, mean losses and their standard errors, [W] each."""
    if LOSS not in run.metrics or TOKENS not in run.metrics:
        return None
    (steps, losses), (at, tokens) = run.metrics[LOSS], run.metrics[TOKENS]
    common, i, j = np.intersect1d(steps, at, return_indices=True)
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
            # Within a window the loss falls as well: differences of neighbours hold the noise alone.
            noise = np.std(np.diff(values)) / np.sqrt(2)
            rows.append((np.mean(tokens[of == window]), np.mean(values), noise / np.sqrt(len(values))))
    x, mean, error = (np.array(column) for column in zip(*rows, strict=True))
    return x, mean, error


def _reach(x_W: np.ndarray, loss_W: np.ndarray, loss: float) -> float:
    """Log tokens at which a curve, made to fall, first comes down to a loss."""
    falling = np.minimum.accumulate(loss_W)
    if falling[-1] > loss:
        return float(x_W[-1])
    # np.interp wants rising abscissae; equal ones are left out.
    keep = np.concatenate([[True], np.diff(falling) < 0])
    return float(np.interp(-loss, -falling[keep], x_W[keep]))
