"""Formats a fit as text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from lm_trainer.ladder.fit.diagnostics import HeldOutPoint, Influence
from lm_trainer.ladder.fit.fitting import Fit
from lm_trainer.ladder.fit.isoflop import IsoFlop
from lm_trainer.ladder.fit.repeats import RepeatLaw
from lm_trainer.ladder.tables import format_number, format_table

_UNITS = {
    "residuals": "errors of log L, with N and D as they are",
    "points": "points",
    "runs": "whole runs (size and seed)",
}


def fit_text(
    fit: Fit, held: Sequence[HeldOutPoint], effect: Influence, notes: Sequence[str], iso: IsoFlop | None
) -> str:
    """Formats the constants, the points, the back-test and the notes."""
    parts = [law_text(fit), points_text(fit, effect), backtest_text(held), iso_text(fit, iso)]
    if notes:
        parts.append("Notes:\n" + "\n".join(f"- {note}" for note in notes))
    return "\n\n".join(part for part in parts if part)


def law_text(fit: Fit) -> str:
    """Formats the constants with their intervals."""
    settings, points = fit.settings, fit.points
    method = "variable projection" if settings.method == "vp" else f"Huber on log L, from {settings.start}"
    rows = []
    for name in fit.law.names:
        low, high = fit.interval(name)
        rows.append([name, f"{getattr(fit.law, name):.6g}", f"{low:.4g}", f"{high:.4g}"])
    repeated = isinstance(fit.law, RepeatLaw)
    lines = [
        f"{points.metric}: L(N, D) = E + A / N^alpha + B / D{chr(39) if repeated else ''}^beta"
        + (", D' = U (1 + R* (1 - exp(-(D / U - 1) / R*))), R* = repeats" if repeated else ""),
        f"{len(points)} points of {len(points.sizes)} sizes, {method}",
        format_table(["constant", "value", f"{settings.level:.0%} low", "high"], rows),
        f"bootstrap: {settings.draws} draws of {_UNITS[settings.resample]}, seed {settings.seed}; noise of a point "
        f"{fit.noise:.3%}",
    ]
    if fit.task is not None:
        c = fit.task.chain
        lines.append(
            f"{points.task_metric} = {c.a:.4g} / (1 + exp({c.k:.4g} (L - {c.L0:.4g}))) + {c.b:.4g}, largest error "
            f"{abs(c.accuracy(points.loss) - points.task).max():.3f}"
        )
        lines += [f"{points.task_metric}: {direct.describe()}" for direct in fit.task.direct]
        lines.append(f"{points.task_metric}, {fit.task.reason()}")
    return "\n".join(lines)


def points_text(fit: Fit, effect: Influence) -> str:
    """Formats a table of measured and fitted losses."""
    points = fit.points
    fitted = points.fitted_loss(fit.law)
    rows = [
        [
            points.labels[i],
            format_number(points.num_params[i]),
            format_number(points.tokens[i]),
            f"{points.flops[i]:.2e}",
            f"{points.loss[i]:.4f}",
            f"{fitted[i]:.4f}",
            f"{fit.errors[i]:+.2%}",
            f"{effect.z_scores[i]:+.1f}",
        ]
        for i in range(len(points))
    ]
    head = ["point", "N", "D", "6 N D", "measured", "fitted", "error", "sd left out"]
    return format_table(head, rows)


def backtest_text(held: Sequence[HeldOutPoint]) -> str:
    """Formats the back-test as a table."""
    if not held:
        return "Back-test: too few points to leave the largest rung out."
    rows = [
        [
            h.label,
            *(f"{x:.4f}" for x in (h.measured, h.predicted.value, h.predicted.low, h.predicted.high)),
            f"{h.error:+.2%}",
            "inside" if h.predicted.contains(h.measured) else "outside",
        ]
        for h in held
    ]
    head = ["left out", "measured", "predicted", "low", "high", "error", "interval"]
    return "Back-test, a fit without these points:\n" + format_table(head, rows)


def iso_text(fit: Fit, iso: IsoFlop | None) -> str:
    """Formats a comparison of approach 2 with the law."""
    if iso is None:
        return ""
    exponents = fit.law.alpha + fit.law.beta
    # Exponent of N at the optimum of the law (Hoffmann et al. 2022, equation 4).
    exponent = fit.law.beta / exponents
    return (
        f"Approach 2, {len(iso.valleys)} computes: best N = {iso.scale:.4g} C^{iso.exponent:.4f}; the law has exponent "
        f"{exponent:.4f}"
    )
