"""`lmt runs`: lists the runs on disk."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cli import clean
from cli.common import JsonOption, path_argument
from lm_trainer.core.errors import UserError
from lm_trainer.core.terminal import escape_line

if TYPE_CHECKING:
    from lm_trainer.run.files.listing import RunListing

_HEADINGS = ("run", "state", "step", "loss", "changed", "size")


def runs(
    places: Annotated[
        list[Path] | None,
        path_argument(
            metavar="DIR",
            help="Directories with runs, or configuration files, whose trainer.log_dir is searched.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List runs with state, step, last loss, last change and size, starting with the most recently changed run.

    Without DIR, searches logs/ and the `trainer.log_dir` of the configurations in the working directory and its
    configs/. A branch is listed below its parent, with the step at which it begins. The size includes the run
    directory and its checkpoints, except checkpoints in a bucket.

    Examples:
        lmt runs

        lmt runs my.yaml /mnt/runs/logs --json
    """
    import json
    from dataclasses import asdict

    from lm_trainer.run.files.find_run import find_log_directories, read_log_directory
    from lm_trainer.run.files.listing import as_tree, list_runs

    missing = [path for path in places or () if not path.exists()]
    if missing:
        raise UserError(f"{missing[0]}: there is no such directory or configuration file")
    bases = [read_log_directory(p) if p.is_file() else p for p in places] if places else find_log_directories()
    listings = list_runs(bases)
    if as_json:
        clean.echo(json.dumps([{**asdict(run), "directory": str(run.directory)} for run in listings]))
    elif listings:
        clean.echo("\n".join(_format_table([_HEADINGS, *(_run_row(run, depth) for depth, run in as_tree(listings))])))
    else:
        clean.echo(f"no runs in {', '.join(map(str, bases))}")


def _run_row(run: "RunListing", depth: int) -> tuple[str, ...]:
    from datetime import datetime

    step = f"{run.step}/{'?' if run.steps is None else run.steps}"
    loss = "" if run.loss is None else f"{run.loss:.4f}"
    changed = datetime.fromtimestamp(run.changed).strftime("%Y-%m-%d %H:%M")
    name = escape_line(run.id if run.directory.parent == Path("logs") else str(run.directory))
    if run.branched_at is not None:
        origin = "" if depth else f" of {run.parent}"
        name = escape_line(f"{'  ' * (depth - 1)}{'└ ' * (depth > 0)}{name}, from {run.branched_at}{origin}")
    return name, run.state, step, loss, changed, _format_size(run.bytes)


def _format_size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def _format_table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = {"step", "loss", "size"}
    return [
        "  ".join(
            cell.rjust(width) if heading in right else cell.ljust(width)
            for cell, width, heading in zip(row, widths, rows[0], strict=True)
        ).rstrip()
        for row in rows
    ]
