"""Pictures of a fit, as SVG."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.diagnostics import Held
from lm_trainer.ladder.fit.fitting import Fit
from lm_trainer.ladder.fit.law import FLOPS_PER_PARAM
from lm_trainer.ladder.fit.predict import Prediction
from lm_trainer.ladder.tables import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (7.2, 4.4)
"""Inches."""
_STYLE: dict[Any, Any] = {
    # Without a salt, the identifiers of an SVG are random, and a report would differ each time it is written.
    "svg.hashsalt": "ladder",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
_BAND = "0.6"
_BEYOND = 10.0
"""Compute over that of the largest rung, up to which laws are drawn."""
_COMPUTES = 6
"""Curves of the picture of losses at one compute."""


@contextlib.contextmanager
def _drawing(found: list[str]) -> Iterator[Axes]:
    """An axes, whose SVG is appended to `found`.

    Raises:
        UserError: without matplotlib.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("pictures need matplotlib: pip install 'lm_trainer[ladder]'") from None
    # Figures without pyplot: it keeps every figure, and sets a backend for the whole process.
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_SIZE, layout="constrained")
        FigureCanvasSVG(figure)
        yield figure.add_subplot()
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    found.append(inline(buffer.getvalue(), len(found)))


def inline(svg: str, number: int) -> str:
    """An SVG file as an element of a page, with identifiers of its own."""
    # The XML header and document type belong to a file, not to an element.
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    return re.sub(r'(id="|href="#|url\(#)', rf"\g<1>f{number}-", body)


def _colors(count: int) -> list:
    from matplotlib import colormaps

    # Up to 0.88: the yellow at the end can hardly be seen on white.
    return [colormaps["viridis"](x) for x in np.linspace(0, 0.88, count)]


def draw(found: Fit, held: list[Held], target: Prediction | None) -> list[tuple[str, str, str]]:
    """Draws all pictures: (title, SVG, caption) of each."""
    pictures: list[str] = []
    with _drawing(pictures) as axes:
        _loss(axes, found, target)
    with _drawing(pictures) as axes:
        _residuals(axes, found)
    with _drawing(pictures) as axes:
        _isoflop(axes, found)
    said = [
        (
            "Loss against compute",
            "Measured losses and the law for each size, dotted where it goes beyond the points. Grey: the best loss "
            f"for each compute, with its {found.settings.level:.0%} interval.",
        ),
        (
            "Residuals",
            "log(measured / fitted). A pattern, rather than a cloud, says that the law does not hold here. Grey: two "
            "standard deviations.",
        ),
        ("Loss against size at one compute", "What the law gives for each compute; the circle is the best size."),
    ]
    if held:
        with _drawing(pictures) as axes:
            _backtest(axes, held, found.points.metric)
        said.append(("Back-test", "The largest rung, which the fit did not see: its prediction and what was measured."))
    if found.chain is not None:
        with _drawing(pictures) as axes:
            _chain(axes, found)
        said.append(("From loss to accuracy", "The sigmoid of the second step, with its interval."))
    return [(title, svg, text) for (title, text), svg in zip(said, pictures, strict=True)]


def _loss(axes: Axes, found: Fit, target: Prediction | None) -> None:
    points, law = found.points, found.law
    end = max(_BEYOND * found.max_flops, 2 * (target.flops if target else 0))
    if law.A > 0 and law.B > 0:
        flops = np.geomspace(points.flops.min(), end, 80)
        best = law.loss(*law.optimum(flops))
        # (draws, 1) against (computes,).
        drawn = found.draws.at((slice(None), None))
        with np.errstate(invalid="ignore"):
            losses = drawn.loss(*drawn.optimum(flops))
        tail = (1 - found.settings.level) / 2
        axes.fill_between(flops, *np.nanquantile(losses, [tail, 1 - tail], axis=0), color=_BAND, alpha=0.3, linewidth=0)
        axes.plot(flops, best, color="0.35", linewidth=1.2, label="best N and D")
    for size, color in zip(points.sizes, _colors(len(points.sizes)), strict=True):
        own = points.num_params == size
        least, most = points.tokens[own].min(), points.tokens[own].max()
        for start, stop, style in ((least, most, "-"), (most, 4 * most, ":")):
            tokens = np.geomspace(start, stop, 40)
            axes.plot(FLOPS_PER_PARAM * size * tokens, law.loss(size, tokens), style, color=color, linewidth=1.3)
        axes.plot(points.flops[own], points.loss[own], "o", color=color, markersize=5, label=f"N {short(size)}")
    if target is not None:
        low, high = target.run.value - target.run.low, target.run.high - target.run.value
        name = f"N {short(target.num_params)}, D {short(target.tokens)}"
        bars = [[max(low, 0)], [max(high, 0)]]
        axes.errorbar([target.flops], [target.run.value], yerr=bars, fmt="D", color="crimson", capsize=4, label=name)
    axes.set(xscale="log", xlabel="compute 6 N D, FLOPs", ylabel=points.metric)
    axes.legend(ncols=2)


def _residuals(axes: Axes, found: Fit) -> None:
    points = found.points
    # Two standard deviations, in percent.
    axes.axhspan(-200 * found.noise, 200 * found.noise, color=_BAND, alpha=0.2, linewidth=0)
    axes.axhline(0, color="0.4", linewidth=0.8)
    for size, color in zip(points.sizes, _colors(len(points.sizes)), strict=True):
        own = np.flatnonzero(points.num_params == size)
        own = own[np.argsort(points.flops[own])]
        axes.plot(
            points.flops[own], 100 * found.errors[own], "o-", color=color, linewidth=0.7, label=f"N {short(size)}"
        )
    axes.set(xscale="log", xlabel="compute 6 N D, FLOPs", ylabel="measured over fitted, %")
    axes.legend(ncols=2)


def _isoflop(axes: Axes, found: Fit) -> None:
    from matplotlib import colormaps

    points, law, viridis = found.points, found.law, colormaps["viridis"]
    flops = np.geomspace(points.flops.min(), _BEYOND * found.max_flops, _COMPUTES)
    least, most = points.num_params.min() / 3, points.num_params.max() * 30
    middle = np.sqrt(FLOPS_PER_PARAM * np.exp(np.log(points.tokens / points.num_params).mean()))
    for value, color in zip(flops, _colors(_COMPUTES), strict=True):
        # A twentieth to twenty times the size that has the mean number of tokens per parameter of the points.
        near = np.sqrt(value) / middle
        sizes = np.geomspace(max(near / 20, least / 10), min(near * 20, most), 120)
        losses = law.loss(sizes, value / (FLOPS_PER_PARAM * sizes))
        axes.plot(sizes, losses, color=color, linewidth=1.4, label=f"{value:.1e} FLOPs")
        index = int(np.argmin(losses))
        if 0 < index < len(sizes) - 1:
            axes.plot(sizes[index], losses[index], "o", color=color, markersize=8, fillstyle="none")
    place = np.log(points.flops / flops[0]) / np.log(flops[-1] / flops[0])
    axes.scatter(points.num_params, points.loss, 14, [viridis(0.88 * x) for x in place], label="measured")
    axes.set(xscale="log", xlabel="parameters N", ylabel=points.metric)
    # Curves of small computes rise far above what was measured, and would press the points together.
    span = np.ptp(points.loss)
    lowest = float(law.loss(*law.optimum(flops[-1]))) if law.A > 0 and law.B > 0 else points.loss.min()
    axes.set_ylim(min(lowest, points.loss.min()) - 0.1 * span, points.loss.max() + 0.4 * span)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _backtest(axes: Axes, held: list[Held], metric: str) -> None:
    where = np.arange(len(held))
    values = np.array([[h.predicted.value, h.predicted.low, h.predicted.high] for h in held]).T
    bars = np.maximum([values[0] - values[1], values[2] - values[0]], 0)
    axes.errorbar(where - 0.06, values[0], yerr=bars, fmt="s", color="steelblue", capsize=4, label="predicted")
    axes.plot(where + 0.06, [h.measured for h in held], "o", color="crimson", label="measured")
    axes.set_xticks(where, [h.label for h in held])
    axes.set(ylabel=metric, xlim=(-0.6, len(held) - 0.4))
    axes.legend()


def _chain(axes: Axes, found: Fit) -> None:
    points, chain, drawn = found.points, found.chain, found.chain_draws
    assert chain is not None
    assert drawn is not None
    assert points.task is not None
    losses = np.linspace(points.loss.min() - np.ptp(points.loss), points.loss.max() * 1.02, 120)
    tail = (1 - found.settings.level) / 2
    many = type(drawn)(*(np.asarray(column)[:, None] for column in vars(drawn).values())).accuracy(losses)
    axes.fill_between(losses, *np.quantile(many, [tail, 1 - tail], axis=0), color=_BAND, alpha=0.3, linewidth=0)
    axes.plot(losses, chain.accuracy(losses), color="0.3")
    for size, color in zip(points.sizes, _colors(len(points.sizes)), strict=True):
        own = points.num_params == size
        axes.plot(points.loss[own], points.task[own], "o", color=color, label=f"N {short(size)}")
    axes.set(xlabel=points.metric, ylabel=points.task_metric)
    axes.legend()
