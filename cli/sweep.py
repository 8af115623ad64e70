"""`lmt sweep`: trains one configuration with several values of some keys."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import clean
from cli.common import ConfigArgument, JsonOption, OverridesArgument, load_run_config, path_option
from lm_trainer.core.errors import UserError

if TYPE_CHECKING:
    from lm_trainer.sweep.settings import SweepRun


def sweep(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="SEED,SEED,...", help="Train every setting with each of these trainer.seed."),
    ] = None,
    paired: Annotated[
        bool, typer.Option("--paired", help="Combine values by position: first with first, second with second.")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Beginning of the run IDs.", show_default="name of the file"),
    ] = None,
    launch: Annotated[
        str | None,
        typer.Option(
            "--launch",
            metavar="'KIND OPTION...'",
            help="Start every run with `lmt launch KIND`, for example --launch 'slurm --time 2:00:00 --submit'.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the runs with their states, and exit.")] = False,
    out: Annotated[
        Path | None,
        path_option("--out", metavar="FILE.html", help="Report to write.", show_default="NAME-sweep.html"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a configuration with every combination of the values of some keys, one run after the other.

    A key with several values, separated by commas, is swept; all others are fixed. Every run has its own directory and
    process, and is an ordinary run of `lmt train`. Repeat the command to continue a sweep: finished runs are skipped,
    and a stopped run resumes. A run that fails does not end the sweep. At the end, prints a table of the runs with the
    lowest loss marked by *, and writes it to a report, together with the curves of all runs.

    Examples:
        lmt sweep my.yaml optimizer.learning_rate=1e-4,3e-4,1e-3 optimizer.weight_decay=0,0.1

        lmt sweep my.yaml optimizer.learning_rate=1e-3,3e-3 --seeds 0,1,2 --dry-run

        lmt sweep my.yaml model.hidden_dim=256,512 optimizer.learning_rate=1e-3,5e-4 --paired
    """
    from lm_trainer.run.config.run_id import explain_invalid_run_id
    from lm_trainer.sweep.running import run_directory, run_state, train_runs
    from lm_trainer.sweep.settings import plan_runs, split_overrides, split_values

    name = name or config.stem
    if problem := explain_invalid_run_id(name):
        raise UserError(f"--name: {problem}")
    kind = shlex.split(launch) if launch else []
    fixed, swept = split_overrides(overrides or [])
    runs = plan_runs(name, fixed, swept, seeds=split_values(seeds) if seeds else (), paired=paired)
    # All configurations are checked before the first run starts.
    configs = [load_run_config(ctx, config, list(run.overrides)) for run in runs]
    states = [run_state(loaded, run) for loaded, run in zip(configs, runs, strict=True)]
    if dry_run:
        _print_runs(runs, states, config, as_json=as_json)
        return
    todo = [run for run, state in zip(runs, states, strict=True) if state != "done"]
    if len(todo) < len(runs):
        clean.echo(f"{len(runs) - len(todo)} of {len(runs)} runs are done", err=True)
    start = ["launch", kind[0], str(config)] if kind else ["train", str(config)]
    commands = [(run.run_id, [*start, *run.overrides, *kind[1:]]) for run in todo]
    code = train_runs(commands, lambda line: clean.echo(line, err=True))
    _write_report(
        [run_directory(loaded, run) for loaded, run in zip(configs, runs, strict=True)],
        out or Path(f"{name}-sweep.html"),
        as_json=as_json,
    )
    raise typer.Exit(code)


def _print_runs(runs: "Sequence[SweepRun]", states: Sequence[str], config: Path, *, as_json: bool) -> None:
    commands = [["lmt", "train", str(config), *run.overrides] for run in runs]
    if as_json:
        from lm_trainer.core.terminal import json_line

        entries = [
            {"run": run.run_id, "state": state, "values": dict(run.settings), "command": command}
            for run, state, command in zip(runs, states, commands, strict=True)
        ]
        clean.echo(json_line({"runs": entries}))
        return
    for run, state, command in zip(runs, states, commands, strict=True):
        clean.echo(f"{run.run_id}  {state}  {shlex.join(command)}")


def _write_report(directories: list[Path], out: Path, *, as_json: bool) -> None:
    """Prints the table of the runs that have done a step, and writes the report."""
    from lm_trainer.core.files import write_atomically
    from lm_trainer.core.terminal import json_line
    from lm_trainer.report.comparison import compare_runs_in_table
    from lm_trainer.report.page import build_report_page
    from lm_trainer.report.run import read_run
    from lm_trainer.trackers.jsonl import METRICS

    started = [directory for directory in directories if (directory / METRICS).is_file()]
    if not started:
        if as_json:
            clean.echo(json_line({"runs": []}))
        return
    loaded = [read_run(str(directory)) for directory in started]
    table = compare_runs_in_table(loaded)
    write_atomically(out, build_report_page(loaded))
    if as_json:
        clean.echo(json_line({**table.as_dict(), "page": str(out)}))
        return
    rows = table.text_rows()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        clean.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    clean.echo(f"wrote {out}")
