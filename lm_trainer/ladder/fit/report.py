"""A fit as one HTML file that needs nothing else."""

from __future__ import annotations

import html
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lm_trainer.core.files import AnyPath, local_path
from lm_trainer.ladder.config import LadderConfig
from lm_trainer.ladder.fit.diagnostics import backtest, influence, notes
from lm_trainer.ladder.fit.figures import draw, inline
from lm_trainer.ladder.fit.fitting import Fit
from lm_trainer.ladder.fit.isoflop import fit_isoflop
from lm_trainer.ladder.fit.predict import Prediction, lines
from lm_trainer.ladder.fit.tables import held_text, iso_text, law_text, points_text
from lm_trainer.ladder.rungs import batch_shape, count_params
from lm_trainer.plot import save_image

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff; max-width: 60rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
svg { max-width: 100%; height: auto; }
pre { font: 13px/1.45 ui-monospace, monospace; overflow-x: auto; background: #f6f6f4; padding: .8rem 1rem; }
pre.wrap { white-space: pre-wrap; }
p.said { color: #555; margin: .2rem 0 .8rem; } li { margin: .3rem 0; }
"""


def write_report(
    path: AnyPath, found: Fit, *, title: str, ladder: LadderConfig | None = None, target: Prediction | None = None
) -> None:
    """Writes the page: the fit, the evidence against it, and its pictures.

    Args:
        path: of the file.
        found: the fit.
        title: of the page.
        ladder: shows the learning rates of its sizes as well.
        target: a run to show beside the points.

    Raises:
        UserError: without matplotlib.
    """
    held, effect = backtest(found), influence(found)
    parts = [f"<h1>Model ladder {html.escape(title)}</h1>", f"<pre>{html.escape(law_text(found))}</pre>"]
    if target is not None:
        parts += [_head("Prediction"), f'<pre class="wrap">{html.escape(chr(10).join(lines(target)))}</pre>']
    if said := notes(found, effect):
        parts += [_head("What to keep in mind"), _list(said)]
    for heading, svg, text in draw(found, held, target):
        parts += [_head(heading), f'<p class="said">{html.escape(text)}</p>', svg]
    if iso := fit_isoflop(found.points):
        parts.append(f"<p>{html.escape(iso_text(found, iso))}</p>")
    if ladder is not None:
        parts += [_head("Learning rates"), *_schedules(ladder)]
    parts += [_head("Points"), f"<pre>{html.escape(points_text(found, effect))}</pre>"]
    parts.append(f"<pre>{html.escape(held_text(held))}</pre>")
    page = f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
    page += f"<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    path = local_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)


def _head(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def _list(items: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(item)}</li>" for item in items) + "</ul>"


def _schedules(ladder: LadderConfig) -> list[str]:
    parts = []
    # Pictures of schedules are made as files, by the same function as everywhere.
    with tempfile.TemporaryDirectory() as folder:
        for number, size in enumerate(ladder.sizes):
            file = Path(folder) / "rate.svg"
            num_params, batch = count_params(ladder, size), batch_shape(ladder, size).batch_size
            save_image(ladder.run_configurator.lr_plot(num_params, batch), file)
            # Numbers from 100 on: the pictures of the fit have the ones below.
            parts += [f"<h3>{html.escape(size)}</h3>", inline(file.read_text(), 100 + number)]
    return parts
