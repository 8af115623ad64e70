"""`lmt report`: a page about one run, or about several."""

from pathlib import Path
from typing import Annotated

from cli import clean
from cli.common import path_option, place_argument


def report(
    runs: Annotated[
        list[str], place_argument(metavar="RUN...", help="Run ids, run directories, or URLs.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        path_option("--out", metavar="FILE.html", help="The page to write.", show_default="RUN-report.html"),
    ] = None,
    figures: Annotated[
        Path | None,
        path_option("--figures", metavar="DIR", help="Write the curves there as well, as SVG and PNG files."),
    ] = None,
) -> None:
    """Write a page about a run, or about several beside one another; it is one file and needs no network.

    It shows what was run (the configuration where it is not the default, devices, attempts), curves with smoothing and
    logarithmic axes, evaluations, alerts, samples, token probabilities and the fingerprint; of several runs also the
    differences of their configurations, the first step where their bits part, and the tokens that each needs for the
    loss of the first. The run may be going on.

    For example:

        lmt report my-run

        lmt report my-run other-run --out both.html --figures figures
    """
    from lm_trainer.core.files import write_atomically
    from lm_trainer.report.figures import write_figures
    from lm_trainer.report.page import report_page
    from lm_trainer.report.run import read_run, told_apart

    found = told_apart([read_run(run) for run in runs])
    out = out or Path(f"{'-'.join(run.path.name for run in found[:3])}-report.html")
    page = report_page(found)
    write_atomically(out, page)
    clean.echo(f"wrote {out} ({len(page.encode()) / 1e6:.1f} MB)")
    if figures is not None:
        clean.echo(f"wrote {len(write_figures(found, figures))} files to {figures}")
