"""`lmt without`: trains the run in which documents never counted."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import clean
from cli.common import RunArgument, check_is_run, path_option
from cli.train import train_to_end
from lm_trainer.core.errors import UserError

if TYPE_CHECKING:
    from lm_trainer.reproduce.without import WithoutPlan


def without(
    ctx: typer.Context,
    run: RunArgument,
    documents: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DOCUMENT",
            help="Numbers of documents, as `lmt data find` prints them; in a mixture, SET:NUMBER, or SET for all.",
            show_default=False,
        ),
    ] = None,
    *,
    file: Annotated[
        list[Path] | None,
        path_option("--file", metavar="F", help="A list of documents, as `lmt data overlap -o` writes it."),
    ] = None,
    hashes: Annotated[
        Path | None,
        path_option("--hashes", metavar="F", help="A file with the SHA-256 hash of a document's text on each line."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="The run id.", show_default="RUN-without-DOCUMENT"),
    ] = None,
    at: Annotated[
        int | None,
        typer.Option("--at", metavar="STEP", help="End after this step.", show_default="the end of RUN"),
    ] = None,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Create the run and its first checkpoint, but do not train.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the first step that counts a document, and what holds it.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --dry-run or --prepare, print one JSON object.")
    ] = False,
) -> None:
    """Train the run in which documents never counted, from the checkpoint before the first step that counts one.

    All rows keep their places. The documents' tokens are padding, so they have no weight in the loss and no token
    attends to them; the loss is the mean over the other tokens (data.without). The bits are equal to a run that leaves
    the documents out from its first step. The same command resumes the run. RUN is not modified. Lists the checkpoints,
    caches and branches on this machine that still hold the documents; none of them is removed.

    Examples:
        lmt without my-run 4711 --dry-run

        lmt without my-run --file benchmark-overlap.jsonl --name clean
    """
    from lm_trainer.core.runtime import prepare_process

    # Called before jax is imported, because it configures jax's allocator and threads.
    tuned = prepare_process()
    check_is_run(ctx, run)
    if as_json and not (dry_run or prepare):
        raise UserError("--json needs --dry-run or --prepare; a run that trains writes metrics.jsonl and summary.json")
    import sys

    from lm_trainer.reproduce.record import RunRecord
    from lm_trainer.reproduce.rerun import QuietProgress
    from lm_trainer.reproduce.without import Selection, plan_without

    record = RunRecord.read(run)
    selection = Selection(documents or [], file or [], hashes)
    with QuietProgress(record.last, stream=sys.stderr) as progress:
        plan = plan_without(record, selection, name, progress)
    _check_end(plan, at)
    _print_plan(plan, as_json=as_json)
    if not dry_run:
        _start(plan, tuned, at, prepare=prepare)


def _check_end(plan: "WithoutPlan", at: int | None) -> None:
    total = plan.config.trainer.num_train_steps
    if at is not None and not plan.first_step <= at <= total:
        raise UserError(
            f"--at {at}: the first step that counts one of the documents is {plan.first_step}, and the run has {total} "
            "steps; give a step between them"
        )


def _print_plan(plan: "WithoutPlan", *, as_json: bool) -> None:
    if as_json:
        import json

        clean.echo(json.dumps(plan.as_dict()))
        return
    counts = ", ".join(f"{count:,} of {name}" for name, count in plan.documents.items())
    clean.echo(f"documents that do not count: {counts}; the first step that counts one is {plan.first_step}")
    begins = (
        f"the checkpoint of step {plan.start}" if plan.start else "the start, because there is no earlier checkpoint"
    )
    clean.echo(f"{plan.name} begins at {begins} of {plan.record.id}")
    if not plan.config.trainer.bitwise:
        clean.echo(
            "note: trainer.determinism: fast promises no equal bits, so the new run is only close to one that left the "
            "documents out from its first step"
        )
    clean.echo("\n  ".join(["these still hold the documents, or what was learnt from them:", *plan.holds]))


def _start(plan: "WithoutPlan", notes: list[str], at: int | None, *, prepare: bool) -> None:
    import contextlib
    import sys

    from lm_trainer.reproduce.branch import prepare_branch
    from lm_trainer.reproduce.rerun import QuietProgress

    config_file = plan.record.path / "config.yaml"
    if plan.branch is not None:
        with QuietProgress(plan.start, stream=sys.stderr) as progress:
            config_file = prepare_branch(plan.branch, progress) / "config.yaml"
    elif prepare:
        raise UserError("--prepare: the run begins at step 0, so there is no first checkpoint to create; train it")
    if not prepare:
        with contextlib.chdir(plan.record.root):
            train_to_end(plan.config, config_file, [], notes, until=at)
