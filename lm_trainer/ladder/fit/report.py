"""Report of a fit as one self-contained HTML file."""

from __future__ import annotations

import tempfile
from pathlib import Path

from lm_trainer.core.files import AnyPath, local_path
from lm_trainer.core.html_page import render_page
from lm_trainer.ladder.config import LadderConfig
from lm_trainer.ladder.fit.diagnostics import backtest, collect_caveats, measure_influence
from lm_trainer.ladder.fit.figures import draw_plots, inline_svg
from lm_trainer.ladder.fit.fitting import Fit
from lm_trainer.ladder.fit.isoflop import fit_isoflop
from lm_trainer.ladder.fit.predict import Prediction, prediction_lines
from lm_trainer.ladder.fit.tables import backtest_text, iso_text, law_text, points_text
from lm_trainer.ladder.rungs import batch_shape, count_params, rung_optimizer
from lm_trainer.plot import save_image
from lm_trainer.run.config.parametrization import StandardConfig


def write_report(
    path: AnyPath, fit: Fit, *, title: str, ladder: LadderConfig | None = None, target: Prediction | None = None
) -> None:
    """Writes the page: the fit, the evidence against it, and its plots.

    Args:
        path: path of the file.
        fit: the fit.
        title: title of the page.
        ladder: a ladder whose learning rates are shown as well.
        target: prediction of a run, which is shown together with the points.

    Raises:
        UserError: if matplotlib is not installed.
    """
    held, effect = backtest(fit), measure_influence(fit)
    iso = fit_isoflop(fit.points)
    page = render_page(
        "lm_trainer.ladder.fit",
        "report.html",
        title=title,
        law=law_text(fit),
        prediction="" if target is None else "\n".join(prediction_lines(target)),
        notes=collect_caveats(fit, effect),
        pictures=draw_plots(fit, held, target),
        iso=iso_text(fit, iso) if iso else "",
        schedules=_draw_schedules(ladder) if ladder is not None else [],
        points=points_text(fit, effect),
        held=backtest_text(held),
    )
    path = local_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _draw_schedules(ladder: LadderConfig) -> list[tuple[str, str]]:
    """Plots the learning rate of each size; returns (size, SVG) pairs."""
    pictures = []
    # The plot function writes files, so the plots are read back from a temporary folder.
    with tempfile.TemporaryDirectory() as folder:
        for number, size in enumerate(ladder.sizes):
            file = Path(folder) / "rate.svg"
            num_params, batch = count_params(ladder, size), batch_shape(ladder, size).batch_size
            is_standard = isinstance(ladder.parametrization, StandardConfig)
            optimizer = None if is_standard else rung_optimizer(ladder, size, batch)
            save_image(ladder.run_configurator.lr_plot(num_params, batch, optimizer), file)
            # Numbers start at 100, because the plots of the fit use lower numbers.
            pictures.append((size, inline_svg(file.read_text(encoding="utf-8"), 100 + number)))
    return pictures
