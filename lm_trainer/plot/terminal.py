"""Schedule plots as text: curves of Braille dots, and a row for each kind of mark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plotille import Canvas

from lm_trainer.plot.curves import Curve, Marks, Panel, SchedulePlot

_MARGIN = 12
"""Number of columns for labels to the left of a panel."""
_LISTED = 6
"""Maximum number of steps that are listed individually."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def to_text(plot: SchedulePlot, *, width: int = 80, height: int = 10) -> str:
    """Formats all panels, one below the other. A constant value is printed instead of plotted.

    Args:
        plot: the panels and marks to draw.
        width: width of the terminal in columns.
        height: height of each panel in lines.
    """
    columns = max(20, width - _MARGIN - 1)
    marks = [*(row.rstrip() for row in _mark_rows(plot, columns)), "", *_describe_marks(plot.marks)]
    first, *other_panels = (_format_panel(panel, plot.num_steps, columns, height) for panel in plot.panels)
    return "\n\n".join("\n".join(block) for block in ([*first, *marks], *other_panels)) + "\n"


def _format_panel(panel: Panel, total: int, columns: int, height: int) -> list[str]:
    if all(len({value for _, value in curve.points}) == 1 for curve in panel.curves):
        several = len(panel.curves) > 1
        values = ", ".join(f"{c.name if several else ''} {c.points[0][1]:.4g}".strip() for c in panel.curves)
        return [f"{panel.title}: {values}"]
    top = max(value for curve in panel.curves for _, value in curve.points)
    # A Braille character is 2 dots wide and 4 high.
    canvas = Canvas(columns, height, 0, 0, 2 * columns, 4 * height)
    scale = ((2 * columns - 1) / total, (4 * height - 1) / top)
    letters = _LETTERS if len(panel.curves) > 1 else " "
    for index, curve in enumerate(panel.curves):
        _draw_curve(canvas, curve, scale, letters[index % len(letters)])
    labels = {0: f"{top:.4g}", height - 1: "0"}
    return [
        f"{'':{_MARGIN}}{panel.title}",
        *(f"{labels.get(row, ''):>{_MARGIN - 2}} │{line}" for row, line in enumerate(canvas.plot().split("\n"))),
        f"{'':{_MARGIN - 1}}└{'─' * columns}",
        f"{'':{_MARGIN}}0{f'step {total}':>{columns - 1}}",
        *(_legend_lines(panel) if len(panel.curves) > 1 else ()),
    ]


def _draw_curve(canvas: Canvas, curve: Curve, scale: tuple[float, float], letter: str) -> None:
    """Draws a curve. Puts `letter` on each level part, unless it is a space."""
    dots = [(step * scale[0], value * scale[1]) for step, value in curve.points]
    for (x0, y0), (x1, y1) in zip(dots, dots[1:] or dots, strict=False):
        canvas.line(x0, y0, x1, y1)
        if letter != " " and x1 > x0:
            canvas.text((x0 + x1) / 2, (y0 + y1) / 2, letter)


def _legend_lines(panel: Panel) -> Iterator[str]:
    for index, curve in enumerate(panel.curves):
        values = [f"{value:.4g}" for _, value in curve.points[::2]]
        yield f"{'':{_MARGIN}}{_LETTERS[index % len(_LETTERS)]}  {curve.name}: {' -> '.join(values)}"


def _mark_rows(plot: SchedulePlot, columns: int) -> Iterator[str]:
    """Yields one row for each kind of mark, aligned with the panels."""
    marks = plot.marks
    spans = [(start, end, "~") for start, end in marks.warmups]
    for name, marked in (
        ("warm-up", spans),
        ("minimum", [(step, step, "v") for step in marks.minima]),
        ("checkpoint", [(step, step, "C") for step in marks.checkpoints]),
    ):
        row = [" "] * columns
        for start, end, sign in marked:
            # Rounded to dots first, as in the panel, so that marks align with it.
            first, last = (round(step * (2 * columns - 1) / plot.num_steps) // 2 for step in (start, end))
            row[first : last + 1] = sign * (last + 1 - first)
        if marked:
            yield f"{name:>{_MARGIN - 2}}  {''.join(row)}"


def _describe_marks(marks: Marks) -> Iterator[str]:
    if marks.warmups:
        yield "~ warm-up: steps " + _join_items([f"{start} to {end}" for start, end in marks.warmups])
    if marks.minima:
        yield "v lowest learning rate at the end of a cycle: step " + _join_items([str(step) for step in marks.minima])
    yield "C permanent checkpoint: step " + _join_items([str(step) for step in marks.checkpoints])


def _join_items(items: Sequence[str]) -> str:
    if len(items) <= _LISTED:
        return ", ".join(items)
    return f"{', '.join(items[: _LISTED - 1])}, ... {items[-1]} ({len(items)} in all)"
