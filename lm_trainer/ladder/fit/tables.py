"""A fit for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from lm_trainer.ladder.fit.diagnostics import Held, Influence
from lm_trainer.ladder.fit.fitting import Fit
from lm_trainer.ladder.fit.isoflop import IsoFlop
from lm_trainer.ladder.fit.law import CONSTANTS
from lm_trainer.ladder.tables import short, table

_UNITS = {
    "residuals": "errors of log L, with N and D as they are",
    "points": "points",
    "runs": "whole runs (size and seed)",
}


def fit_text(found: Fit, held: Sequence[Held], effect: Influence, said: Sequence[str], iso: IsoFlop | None) -> str:
    """Constants, points, hold-out and notes."""
    parts = [law_text(found), points_text(found, effect), held_text(held), iso_text(found, iso)]
    if said:
        parts.append("Notes:\n" + "\n".join(f"- {note}" for note in said))
    return "\n\n".join(part for part in parts if part)


def law_text(found: Fit) -> str:
    """The constants with their intervals."""
    settings, points = found.settings, found.points
    how = "variable projection" if settings.method == "vp" else f"Huber on log L, from {settings.start}"
    rows = []
    for name in CONSTANTS:
        low, high = found.interval(name)
        rows.append([name, f"{getattr(found.law, name):.6g}", f"{low:.4g}", f"{high:.4g}"])
    lines = [
        f"{points.metric}: L(N, D) = E + A / N^alpha + B / D^beta",
        f"{len(points)} points of {len(points.sizes)} sizes, {how}",
        table(["constant", "value", f"{settings.level:.0%} low", "high"], rows),
        f"bootstrap: {settings.draws} draws of {_UNITS[settings.resample]}, seed {settings.seed}; noise of a point "
        f"{found.noise:.3%}",
    ]
    if found.chain is not None:
        c = found.chain
        lines.append(
            f"{points.task_metric} = {c.a:.4g} / (1 + exp({c.k:.4g} (L - {c.L0:.4g}))) + {c.b:.4g}, largest error "
            f"{abs(c.accuracy(points.loss) - points.task).max():.3f}"
        )
    return "\n".join(lines)


def points_text(found: Fit, effect: Influence) -> str:
    """Measured and fitted."""
    points = found.points
    fitted = found.law.loss(points.num_params, points.tokens)
    rows = [
        [
            points.labels[i],
            short(points.num_params[i]),
            short(points.tokens[i]),
            f"{points.flops[i]:.2e}",
            f"{points.loss[i]:.4f}",
            f"{fitted[i]:.4f}",
            f"{found.errors[i]:+.2%}",
            f"{effect.strange[i]:+.1f}",
        ]
        for i in range(len(points))
    ]
    head = ["point", "N", "D", "6 N D", "measured", "fitted", "error", "sd left out"]
    return table(head, rows)


def held_text(held: Sequence[Held]) -> str:
    """The back-test."""
    if not held:
        return "Back-test: too few points to leave the largest rung out."
    rows = [
        [
            h.label,
            *(f"{x:.4f}" for x in (h.measured, h.predicted.value, h.predicted.low, h.predicted.high)),
            f"{h.error:+.2%}",
            "inside" if h.predicted.holds(h.measured) else "outside",
        ]
        for h in held
    ]
    head = ["left out", "measured", "predicted", "low", "high", "error", "interval"]
    return "Back-test, a fit without these points:\n" + table(head, rows)


def iso_text(found: Fit, iso: IsoFlop | None) -> str:
    """Approach 2 beside the law."""
    if iso is None:
        return ""
    both = found.law.alpha + found.law.beta
    # The exponent of N in the optimum of the law: Hoffmann et al. 2022, equation 4.
    own = found.law.beta / both
    return (
        f"Approach 2, {len(iso.valleys)} computes: best N = {iso.scale:.4g} C^{iso.exponent:.4f}; the law has exponent "
        f"{own:.4f}"
    )
