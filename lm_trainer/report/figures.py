"""Draws the curves of runs to image files, for use in a paper."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.core.safe_names import path_inside
from lm_trainer.report.downsample import downsample
from lm_trainer.report.page import GROUPS, POINTS
from lm_trainer.report.run import ReportedRun

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a82", "#b3a300")
"""Colours that are also distinguishable with colour vision deficiency (Okabe and Ito 2008)."""
_LEFT_OUT = "Everything else"


def write_figures(runs: Sequence[ReportedRun], directory: Path) -> list[Path]:
    """Draws every metric that belongs to a named group, and returns the paths of the files.

    The files are `NAME.svg` and `NAME.png`, with `/` in the name of the metric replaced by `-`.

    Raises:
        UserError: if matplotlib is not installed, or the files cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--figures needs matplotlib: pip install 'lm_trainer[plot]'") from None
    written = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in sorted({name for run in runs for name in run.metrics}):
            group = next((title for title, pattern in GROUPS if re.fullmatch(pattern, name)), _LEFT_OUT)
            if group == _LEFT_OUT:
                continue
            figure = Figure(figsize=(5, 3), layout="constrained")
            axis = figure.subplots()
            for index, run in enumerate(runs):
                if name in run.metrics:
                    x, y = downsample(*run.metrics[name], POINTS)
                    axis.plot(x, y, label=_escape_dollars(run.name), linewidth=1, color=_COLORS[index % len(_COLORS)])
            _draw_bands(axis, runs, name)
            axis.set_xlabel("step")
            axis.set_ylabel(_escape_dollars(name))
            axis.grid(alpha=0.3)
            if len(runs) > 1:
                axis.legend(fontsize="small")
            for suffix in ("svg", "png"):
                path = path_inside(directory, f"{name.replace('/', '-')}.{suffix}", runs[0].path)
                figure.savefig(path, dpi=200)
                written.append(path)
    except OSError as error:
        raise UserError(f"{directory}: cannot be written: {error.strerror or error}") from None
    return written


def _draw_bands(axis: Any, runs: Sequence[ReportedRun], metric: str) -> None:
    """Draws the bands that were predicted for a metric, and the predicted values."""
    for index, run in enumerate(runs):
        if run.prediction is None or run.prediction.curve.metric != metric:
            continue
        curve, color = run.prediction.curve, _COLORS[index % len(_COLORS)]
        axis.fill_between(curve.last_steps, curve.low, curve.high, color=color, alpha=0.15, linewidth=0)
        axis.plot(curve.last_steps, curve.value, color=color, linewidth=1, linestyle="--")


def _escape_dollars(name: str) -> str:
    """Escapes the dollar signs in a name, which delimit formulas in matplotlib."""
    return name.replace("$", r"\$")
