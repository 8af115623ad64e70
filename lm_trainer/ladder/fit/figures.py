"""Plots of a fit, as SVG."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.diagnostics import HeldOutPoint
from lm_trainer.ladder.fit.fitting import Fit
from lm_trainer.ladder.fit.law import FLOPS_PER_PARAM
from lm_trainer.ladder.fit.predict import Prediction, predict
from lm_trainer.ladder.tables import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (7.2, 4.4)
"""Size of a plot in inches."""
_STYLE: dict[Any, Any] = {
    # Without a salt, the identifiers in an SVG are random, and every report would be different.
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
_EXTRAPOLATION = 10.0
"""Multiple of the largest rung's compute up to which laws are drawn."""
_COMPUTES = 6
"""Number of curves in the IsoFLOP plot, one per compute budget."""


@contextlib.contextmanager
def _svg_axes(pictures: list[str]) -> Iterator[Axes]:
    """Provides axes to draw on, and appends their SVG to `pictures` when the block ends.

    Raises:
        UserError: if matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("pictures need matplotlib: pip install 'lm_trainer[ladder]'") from None
    # pyplot is not used, because it keeps every figure and sets a backend for the entire process.
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_SIZE, layout="constrained")
        FigureCanvasSVG(figure)
        yield figure.add_subplot()
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    pictures.append(inline_svg(buffer.getvalue(), len(pictures)))


def inline_svg(svg: str, number: int) -> str:
    """Turns the content of an SVG file into an element of a page, with identifiers that are unique in the page."""
    # Drop the XML declaration and the document type of the file.
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    return re.sub(r'(id="|href="#|url\(#)', rf"\g<1>f{number}-", body)


def _colors(count: int) -> list:
    from matplotlib import colormaps

    # Only up to 0.88, because the yellow at the end of the colormap is hard to see on white.
    return [colormaps["viridis"](x) for x in np.linspace(0, 0.88, count)]


def draw_plots(fit: Fit, held: list[HeldOutPoint], target: Prediction | None) -> list[tuple[str, str, str]]:
    """Draws all plots. Returns (title, SVG, caption) of each plot."""
    pictures: list[str] = []
    with _svg_axes(pictures) as axes:
        _plot_loss(axes, fit, target)
    with _svg_axes(pictures) as axes:
        _plot_residuals(axes, fit)
    with _svg_axes(pictures) as axes:
        _plot_isoflop(axes, fit)
    captions = [
        (
            "Loss against compute",
            "Measured losses and the law for each size, dotted where it goes beyond the points. Grey: the best loss "
            f"for each compute, with its {fit.settings.level:.0%} interval.",
        ),
        (
            "Residuals",
            "log(measured / fitted). A pattern, rather than a cloud, says that the law does not hold here. Grey: two "
            "standard deviations.",
        ),
        ("Loss against size at one compute", "What the law gives for each compute; the circle is the best size."),
    ]
    if held:
        with _svg_axes(pictures) as axes:
            _plot_backtest(axes, held, fit.points.metric)
        captions.append(
            ("Back-test", "The largest rung, which the fit did not see: its prediction and what was measured.")
        )
    if fit.task is not None:
        with _svg_axes(pictures) as axes:
            _plot_chain(axes, fit)
        captions.append(("From loss to accuracy", "The sigmoid of the second step, with its interval."))
        with _svg_axes(pictures) as axes:
            _plot_task(axes, fit)
        captions.append(("Accuracy against compute", f"Each form with its interval; {fit.task.reason()}."))
    return [(title, svg, text) for (title, text), svg in zip(captions, pictures, strict=True)]


def _plot_loss(axes: Axes, fit: Fit, target: Prediction | None) -> None:
    points, law = fit.points, fit.law
    end = max(_EXTRAPOLATION * fit.max_flops, 2 * (target.flops if target else 0))
    if law.A > 0 and law.B > 0:
        flops = np.geomspace(points.flops.min(), end, 80)
        best = law.loss(*law.optimum(flops))
        # Constants of shape (draws, 1) broadcast against FLOPs of shape (computes,).
        drawn = fit.draws.select((slice(None), None))
        with np.errstate(invalid="ignore"):
            losses = drawn.loss(*drawn.optimum(flops))
        tail = (1 - fit.settings.level) / 2
        axes.fill_between(flops, *np.nanquantile(losses, [tail, 1 - tail], axis=0), color=_BAND, alpha=0.3, linewidth=0)
        axes.plot(flops, best, color="0.35", linewidth=1.2, label="best N and D")
    for size, color in zip(points.sizes, _colors(len(points.sizes)), strict=True):
        mask = points.num_params == size
        unique = None if points.unique_tokens is None else points.unique_tokens[mask].max()
        shortest, longest = points.tokens[mask].min(), points.tokens[mask].max()
        for start, stop, style in ((shortest, longest, "-"), (longest, 4 * longest, ":")):
            tokens = np.geomspace(start, stop, 40)
            axes.plot(
                FLOPS_PER_PARAM * size * tokens, law.loss(size, tokens, unique), style, color=color, linewidth=1.3
            )
        axes.plot(
            points.flops[mask], points.loss[mask], "o", color=color, markersize=5, label=f"N {format_number(size)}"
        )
    if target is not None:
        low, high = target.run.value - target.run.low, target.run.high - target.run.value
        name = f"N {format_number(target.num_params)}, D {format_number(target.tokens)}"
        bars = [[max(low, 0)], [max(high, 0)]]
        axes.errorbar([target.flops], [target.run.value], yerr=bars, fmt="D", color="crimson", capsize=4, label=name)
    axes.set(xscale="log", xlabel="compute 6 N D, FLOPs", ylabel=points.metric)
    axes.legend(ncols=2)


def _plot_residuals(axes: Axes, fit: Fit) -> None:
    points = fit.points
    # Two standard deviations, in percent.
    axes.axhspan(-200 * fit.noise, 200 * fit.noise, color=_BAND, alpha=0.2, linewidth=0)
    axes.axhline(0, color="0.4", linewidth=0.8)
    for size, color in zip(points.sizes, _colors(len(points.sizes)), strict=True):
        indices = np.flatnonzero(points.num_params == size)
        indices = indices[np.argsort(points.flops[indices])]
        axes.plot(
            points.flops[indices],
            100 * fit.errors[indices],
            "o-",
            color=color,
            linewidth=0.7,
            label=f"N {format_number(size)}",
        )
    axes.set(xscale="log", xlabel="compute 6 N D, FLOPs", ylabel="measured over fitted, %")
    axes.legend(ncols=2)


def _plot_isoflop(axes: Axes, fit: Fit) -> None:
    from matplotlib import colormaps

    points, law, viridis = fit.points, fit.law, colormaps["viridis"]
    flops = np.geomspace(points.flops.min(), _EXTRAPOLATION * fit.max_flops, _COMPUTES)
    smallest, largest = points.num_params.min() / 3, points.num_params.max() * 30
    middle = np.sqrt(FLOPS_PER_PARAM * np.exp(np.log(points.tokens / points.num_params).mean()))
    for value, color in zip(flops, _colors(_COMPUTES), strict=True):
        # From 1/20 to 20 times the size that has the points' mean number of tokens per parameter.
        best_size = np.sqrt(value) / middle
        sizes = np.geomspace(max(best_size / 20, smallest / 10), min(best_size * 20, largest), 120)
        losses = law.loss(sizes, value / (FLOPS_PER_PARAM * sizes))
        axes.plot(sizes, losses, color=color, linewidth=1.4, label=f"{value:.1e} FLOPs")
        index = int(np.argmin(losses))
        if 0 < index < len(sizes) - 1:
            axes.plot(sizes[index], losses[index], "o", color=color, markersize=8, fillstyle="none")
    position = np.log(points.flops / flops[0]) / np.log(flops[-1] / flops[0])
    axes.scatter(points.num_params, points.loss, 14, [viridis(0.88 * x) for x in position], label="measured")
    axes.set(xscale="log", xlabel="parameters N", ylabel=points.metric)
    # Curves for small compute budgets rise far above the measurements, and would squeeze the points together.
    span = np.ptp(points.loss)
    lowest = float(law.loss(*law.optimum(flops[-1]))) if law.A > 0 and law.B > 0 else points.loss.min()
    axes.set_ylim(min(lowest, points.loss.min()) - 0.1 * span, points.loss.max() + 0.4 * span)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _plot_backtest(axes: Axes, held: list[HeldOutPoint], metric: str) -> None:
    positions = np.arange(len(held))
    values = np.array([[h.predicted.value, h.predicted.low, h.predicted.high] for h in held]).T
    bars = np.maximum([values[0] - values[1], values[2] - values[0]], 0)
    axes.errorbar(positions - 0.06, values[0], yerr=bars, fmt="s", color="steelblue", capsize=4, label="predicted")
    axes.plot(positions + 0.06, [h.measured for h in held], "o", color="crimson", label="measured")
    axes.set_xticks(positions, [h.label for h in held])
    axes.set(ylabel=metric, xlim=(-0.6, len(held) - 0.4))
    axes.legend()


def _plot_chain(axes: Axes, fit: Fit) -> None:
    assert fit.task is not None
    points, chain, drawn = fit.points, fit.task.chain, fit.task.chain_draws
    assert points.task is not None
    losses = np.linspace(points.loss.min() - np.ptp(points.loss), points.loss.max() * 1.02, 120)
    tail = (1 - fit.settings.level) / 2
    accuracies = type(drawn)(*(np.asarray(column)[:, None] for column in vars(drawn).values())).accuracy(losses)
    axes.fill_between(losses, *np.quantile(accuracies, [tail, 1 - tail], axis=0), color=_BAND, alpha=0.3, linewidth=0)
    axes.plot(losses, chain.accuracy(losses), color="0.3")
    for size, color in zip(points.sizes, _colors(len(points.sizes)), strict=True):
        mask = points.num_params == size
        axes.plot(points.loss[mask], points.task[mask], "o", color=color, label=f"N {format_number(size)}")
    axes.set(xlabel=points.metric, ylabel=points.task_metric)
    axes.legend()


def _plot_task(axes: Axes, fit: Fit) -> None:
    """Draws the accuracy by each form, for the mean number of tokens per parameter of the points."""
    points, task = fit.points, fit.task
    assert points.task is not None
    assert task is not None
    ratio = float(np.exp(np.log(points.tokens / points.num_params).mean()))
    flops = np.geomspace(points.flops.min(), _EXTRAPOLATION * fit.max_flops, 24)
    sizes = np.sqrt(flops / (FLOPS_PER_PARAM * ratio))
    predictions = [predict(fit, n, ratio * n, extrapolate=True).accuracies for n in sizes]
    # The forms have the same order in every prediction.
    for by_form, color in zip(zip(*predictions, strict=True), _colors(len(predictions[0])), strict=True):
        name, chosen = by_form[0].form, by_form[0].form == task.form
        bands = np.array([(a.law.value, a.law.low, a.law.high) for a in by_form]).T
        axes.fill_between(flops, bands[1], bands[2], color=color, alpha=0.2, linewidth=0)
        axes.plot(flops, bands[0], "-" if chosen else "--", color=color, label=f"{name}, chosen" if chosen else name)
    axes.plot(points.flops, points.task, "o", color="0.2", markersize=5, label="measured")
    axes.set(xscale="log", xlabel="compute 6 N D, FLOPs", ylabel=points.task_metric)
    axes.legend()
