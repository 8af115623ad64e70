"""`lmt report`: writes an HTML page about one or several runs."""

from pathlib import Path
from typing import Annotated

from cli import clean
from cli.common import JsonOption, path_option, storage_argument


def report(
    runs: Annotated[
        list[str], storage_argument(metavar="RUN...", help="Run ids, run directories, or URLs.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        path_option("--out", metavar="FILE.html", help="HTML file to write.", show_default="RUN-report.html"),
    ] = None,
    figures: Annotated[
        Path | None,
        path_option("--figures", metavar="DIR", help="Also write the curves to DIR, as SVG and PNG files."),
    ] = None,
    prediction: Annotated[
        Path | None,
        path_option(
            "--prediction",
            metavar="FILE",
            help="Curve registered for the first run with `lmt ladder register --curve`. Default: the file of "
            "trainer.alerts.off_prediction.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write an HTML page about one run, or a comparison of several runs, as a single file that works offline.

    Shows configuration values that are not defaults, devices, attempts, curves with smoothing and logarithmic axes,
    evaluations, alerts, samples, token probabilities and the fingerprint. For several runs, also shows the differences
    between their configurations, the first step at which they diverge bitwise, and the number of tokens that each run
    needs to reach the first run's loss. A branch is drawn from its first step on, next to its parent, with the
    difference of their losses at equal tokens and its interval. A run whose curve was predicted is drawn inside its
    band. Runs may still be in progress. With --json, prints the same figures without the curves.

    For example:

        lmt report my-run

        lmt report my-run other-run --out both.html --figures figures
    """
    from lm_trainer.core.files import write_atomically
    from lm_trainer.core.terminal import json_line
    from lm_trainer.report.figures import write_figures
    from lm_trainer.report.page import build_report_page, report_facts
    from lm_trainer.report.run import read_run, with_unique_names
    from lm_trainer.trackers.jsonl import encode_non_finite

    loaded = with_unique_names([read_run(run, None if index else prediction) for index, run in enumerate(runs)])
    out = out or Path(f"{'-'.join(run.path.name for run in loaded[:3])}-report.html")
    page = build_report_page(loaded)
    write_atomically(out, page)
    curves = [] if figures is None else write_figures(loaded, figures)
    if as_json:
        facts = {**report_facts(loaded), "page": str(out), "figures": [str(file) for file in curves]}
        clean.echo(json_line(encode_non_finite(facts)))
        return
    clean.echo(f"wrote {out} ({len(page.encode()) / 1e6:.1f} MB)")
    for run in loaded:
        score = run.score_prediction()
        if run.prediction is not None and score is not None:
            clean.echo(score.describe(run.prediction))
    if figures is not None:
        clean.echo(f"wrote {len(curves)} files to {figures}")
