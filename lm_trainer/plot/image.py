"""Schedule plots as image files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import AnyPath, local_path
from lm_trainer.plot.curves import Marks, SchedulePlot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (10.0, 2.6)
"""Size of each panel, in inches."""
DPI = 100
_SUFFIXES = (".png", ".svg", ".pdf")


def save_image(plot: SchedulePlot, path: AnyPath) -> None:
    """Draws every panel, 1000 x 260 pixels each, to a PNG, SVG or PDF file.

    Raises:
        UserError: if the file has another type or cannot be written, or matplotlib is not installed.
    """
    path = local_path(path)
    figure = new_figure(path, (SIZE[0], SIZE[1] * len(plot.panels)))
    axes = figure.subplots(len(plot.panels), sharex=True, squeeze=False)[:, 0]
    for panel, axis in zip(plot.panels, axes, strict=True):
        for curve in panel.curves:
            axis.plot(*zip(*curve.points, strict=True), label=curve.name, linewidth=1.5)
        axis.set_ylabel(panel.title)
        # The axis starts at 0 in every panel, so that heights are comparable.
        axis.set_ylim(bottom=0)
        axis.set_xlim(0, plot.num_steps)
        if len(panel.curves) > 1:
            axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    axes[-1].set_xlabel("step")
    figure.legend(handles=_draw_marks(plot.marks, list(axes)), loc="outside upper center", ncols=3, fontsize="small")
    write_figure(figure, path)


def new_figure(path: Path, size: tuple[float, float]) -> Figure:
    """Makes an empty figure of a size in inches, for a file.

    Raises:
        UserError: if the file is not a PNG, SVG or PDF file, or matplotlib is not installed.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise UserError(f"{path}: expected a file whose name ends in {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "drawing into a file needs matplotlib: pip install 'lm_trainer[plot]'; without --out the plot is drawn in "
            "the terminal"
        ) from None

    # `pyplot` is not used, because it keeps figures alive and looks for a display.
    return Figure(figsize=size, dpi=DPI, layout="constrained")


def write_figure(figure: Figure, path: Path) -> None:
    """Writes a figure to a file. Raises `UserError` if it cannot be written."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


def _draw_marks(marks: Marks, axes: list[Axes]) -> list[Any]:
    """Draws bands and lines in every panel, and triangles below the first. Returns the handles of the legend."""
    for axis in axes:
        # Marks span the height of a panel: x in steps, y from 0 to 1.
        frame = axis.get_xaxis_transform()
        bands = [(start, end - start) for start, end in marks.warmups]
        band = axis.broken_barh(bands, (0, 1), transform=frame, color="tab:orange", alpha=0.15, label="warm-up")
        line = axis.vlines(
            marks.minima, 0, 1, transform=frame, color="tab:gray", linestyle=":", linewidth=1, label="end of a cycle"
        )
    (triangles,) = axes[0].plot(
        marks.checkpoints,
        [0.0] * len(marks.checkpoints),
        transform=axes[0].get_xaxis_transform(),
        clip_on=False,
        linestyle="none",
        marker="^",
        markersize=5,
        color="tab:green",
        label="permanent checkpoint",
    )
    return [*([band] if marks.warmups else []), *([line] if marks.minima else []), triangles]
