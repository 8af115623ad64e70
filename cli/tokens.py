"""`lmt tokens`: writes an HTML page with token probabilities over the steps of one or two runs."""

from pathlib import Path
from typing import Annotated

from cli import clean
from cli.common import path_option, storage_argument


def tokens(
    run: Annotated[str, storage_argument(metavar="RUN", help="A run id, directory or URL.", show_default=False)],
    other: Annotated[
        str | None, storage_argument(metavar="OTHER", help="Another run, for comparison.", show_default=False)
    ] = None,
    out: Annotated[Path, path_option("--out", metavar="FILE.html", help="HTML file to write.")] = Path(
        "token-probabilities.html"
    ),
) -> None:
    """Write an HTML page with the probability of every token of a few held-out documents, over the steps of a run.

    Each evaluation of a run measures these probabilities (trainer.token_probabilities) and updates such a page in the
    run directory. Two runs are shown side by side, with their difference. The page works offline.

    For example:

        lmt tokens my-run

        lmt tokens my-run other-run --out both.html
    """
    from lm_trainer.core.files import write_atomically
    from lm_trainer.run.files.find_run import find_run
    from lm_trainer.trackers.token_page import TokenHistory, render_token_page

    directories = [find_run(name) for name in (run, other) if name is not None]
    names = [path.name for path in directories]
    if len({*names}) < len(names):
        names = [str(name) for name in (run, other)]
    histories = dict(zip(names, map(TokenHistory.read, directories), strict=True))
    page = render_token_page(histories)
    write_atomically(out, page)
    steps = ", ".join(f"{name}: {len(history.steps)} evaluations" for name, history in histories.items())
    clean.echo(f"wrote {out} ({len(page.encode()) / 1e6:.1f} MB; {steps})")
