"""Small pieces of HTML with which objects show themselves in a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_POINTS = 400
"""Number of points of a curve; more are not visible."""
_WIDTH, _HEIGHT, _MARGIN = 480, 180, 44


def html_table(rows: Iterable[Sequence[object]], heads: Sequence[str] = ()) -> str:
    """Returns an HTML table. All texts are escaped."""
    head = f"<thead><tr>{''.join(f'<th>{html.escape(name)}</th>' for name in heads)}</tr></thead>" if heads else ""
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table style="text-align: left">{head}<tbody>{body}</tbody></table>'


def curve_svg(points: Sequence[tuple[float, float]], title: str) -> str:
    """Returns a curve as an SVG image, in the colour of the text around it.

    Args:
        points: pairs of x and y, by rising x. At least two.
        title: name of y.
    """
    shown = [*points[:: -(-len(points) // _POINTS)], points[-1]]
    xs, ys = [x for x, _ in shown], [y for _, y in shown]
    left, right, low, high = xs[0], xs[-1], min(ys), max(ys)
    across, up = (right - left) or 1.0, (high - low) or 1.0
    line = " ".join(
        f"{_MARGIN + (x - left) / across * (_WIDTH - _MARGIN):.1f},{8 + (high - y) / up * (_HEIGHT - 28):.1f}"
        for x, y in shown
    )
    labels = (
        (_MARGIN - 4, 14, "end", f"{high:.3g}"),
        (_MARGIN - 4, _HEIGHT - 20, "end", f"{low:.3g}"),
        (_MARGIN, _HEIGHT - 4, "start", f"{left:g}"),
        (_WIDTH, _HEIGHT - 4, "end", f"{right:g}"),
        (_WIDTH, 14, "end", html.escape(title)),
    )
    texts = "".join(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>' for x, y, anchor, text in labels)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="{html.escape(title)}" '
        f'font-size="11" fill="currentColor"><polyline points="{line}" fill="none" stroke="#3f51b5" '
        f'stroke-width="1.5"/>{texts}</svg>'
    )
