"""`lmt bisect`: finds the operand, the document or the commit that makes a difference, by computing steps again."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import clean
from cli.common import (
    OVERRIDES,
    JsonOption,
    OverridesArgument,
    RunArgument,
    check_is_run,
    path_option,
    storage_argument,
)
from lm_trainer.core.errors import UserError

if TYPE_CHECKING:
    from lm_trainer.reproduce.bisect_runs import RunBisection
    from lm_trainer.reproduce.spike import Spike

app = typer.Typer(
    no_args_is_help=True,
    help="Find what makes two runs differ, what makes a spike, or which commit changed the bits, by computing steps "
    "again.",
)
StepOption = Annotated[
    int, typer.Option("--step", metavar="N", help="The step, as in metrics.jsonl: counted from 1.", show_default=False)
]


@app.callback()
def _prepare() -> None:
    from lm_trainer.core.runtime import prepare_process

    # Called before jax is imported, because it configures jax's allocator and threads.
    prepare_process()


@app.command()
def runs(
    run_a: Annotated[str, storage_argument(metavar="RUN_A", help="A run id, directory or URL.", show_default=False)],
    run_b: Annotated[str, storage_argument(metavar="RUN_B", help="The run to compare it with.", show_default=False)],
    as_json: JsonOption = False,
) -> None:
    """Find the first step, microbatch, layer and operand whose bits differ between two runs that should be equal.

    Finds the first step whose records differ, computes it again in both runs on this machine, from their nearest
    checkpoints, and compares everything that the step reads and computes: state, rows, forward pass, gradients of each
    microbatch, their sum, update. If both come out equal here, says which run recorded other bits. Modifies no run.
    Exit codes: 0 if all common steps are equal, otherwise 1.

    For example:

        lmt bisect runs my-run my-run-again
    """
    import json
    import sys

    from lm_trainer.reproduce.bisect_runs import bisect_runs
    from lm_trainer.reproduce.record import RunRecord
    from lm_trainer.reproduce.rerun import QuietProgress
    from lm_trainer.trackers.jsonl import encode_non_finite

    a, b = RunRecord.read(run_a), RunRecord.read(run_b)
    with QuietProgress(max(a.last, b.last), stream=sys.stderr) as progress:
        result = bisect_runs(a, b, progress)
    if as_json:
        clean.echo(json.dumps(encode_non_finite(result.as_dict())))
    else:
        clean.echo("\n".join(_run_lines(result)))
    if result.step is not None:
        raise typer.Exit(1)


def _run_lines(result: "RunBisection") -> Iterator[str]:
    yield result.sentence()
    location = result.location
    if location is None:
        return
    if location.others:
        more = f" and {len(location.others) - 4} more" if len(location.others) > 4 else ""
        yield f"  also: {', '.join(location.others[:4])}{more}"
    if len(location.microbatches) > 1:
        yield f"  in microbatches {', '.join(map(str, location.microbatches))}"
    if location.row is not None:
        for run in (result.a, result.b):
            yield f"  rows of {run}: lmt replay {run} --step {location.step} --show-batch"


@app.command(context_settings=OVERRIDES)
def spike(
    ctx: typer.Context,
    run: RunArgument,
    step: StepOption,
    overrides: OverridesArgument = None,
    top_k: Annotated[
        int,
        typer.Option("--top-k", metavar="K", min=1, help="Rows to examine; documents and tokens to show."),
    ] = 3,
    as_json: JsonOption = False,
) -> None:
    """Find the rows, documents and tokens whose gradient makes a step's gradient large.

    Computes the step again from the nearest earlier checkpoint, then the gradient norm of each row and of the documents
    in the rows with the largest norms. Loss and gradient norm of the step without a document are computed exactly, and
    documents are ranked by them. Takes as much work as about K steps, and as many more as a microbatch has rows.
    Overrides may change settings that do not affect the results, such as devices. Does not modify the run.

    For example:

        lmt bisect spike my-run --step 12345
    """
    check_is_run(ctx, run)
    import sys

    from lm_trainer.core.terminal import json_line
    from lm_trainer.reproduce.record import RunRecord
    from lm_trainer.reproduce.rerun import QuietProgress
    from lm_trainer.reproduce.spike import explain_spike
    from lm_trainer.trackers.jsonl import encode_non_finite

    record = RunRecord.read(run)
    with QuietProgress(record.last, stream=sys.stderr) as progress:
        result = explain_spike(record, step, top_k=top_k, overrides=overrides or [], progress=progress)
    if as_json:
        clean.echo(json_line(encode_non_finite(result.as_dict())))
    else:
        clean.echo("\n".join(_spike_lines(result, top_k)))


def _spike_lines(result: "Spike", top_k: int) -> Iterator[str]:
    yield result.sentence()
    yield f"\n{'row':>6}{'loss':>12}{'tokens':>8}{'gradient':>12}"
    for row in result.rows[:top_k]:
        yield f"{row.row:>6}{row.loss:>12.4g}{row.tokens:>8g}{row.norm:>12.4g}"
    if result.documents:
        yield f"\n{'document':>14}{'loss':>12}{'tokens':>8}{'gradient':>12}{'without: loss':>16}{'gradient':>12}"
    for document in result.documents:
        yield (
            f"{f'{document.set}:{document.document}':>14}{document.loss:>12.4g}{document.tokens:>8g}"
            f"{document.norm:>12.4g}{document.without.loss:>16.4g}{document.without.grad_norm:>12.4g}  {document.where}"
        )
    if result.together is not None:
        yield (f"{'all of these':>14}{'':>32}{result.together.loss:>16.4g}{result.together.grad_norm:>12.4g}")
    if result.tokens:
        from cli.replay import format_in_context

        yield f"\ntokens of {result.documents[0].set}:{result.documents[0].document}{'loss':>12}{'gradient':>12}"
    for token in result.tokens:
        yield f"  row {token.token.row}, position {token.token.position}: {token.token.loss:.4g}, {token.norm:.4g}"
        yield f"    {format_in_context(token.token)}"
    yield f"\ncomputed {result.microbatches} microbatches, as many as {result.steps:g} steps"


@app.command(context_settings=OVERRIDES)
def code(
    run: RunArgument,
    step: StepOption,
    overrides: OverridesArgument = None,
    checkout: Annotated[
        Path | None,
        path_option(
            "--code", metavar="DIR", help="Root of the checkout to test.", show_default="the installed lm_trainer"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compute a recorded step with the code of a checkout, and end with the exit code that `git bisect run` needs.

    Computes the steps from the nearest checkpoint at least two steps before, in another process, and compares them with
    the record bit for bit. Exit codes: 0 if all bits are equal, 1 if not, 125 if this code cannot compute the step, 128
    for wrong usage, which ends the bisection. Install lm_trainer outside of the checkout, and test the checkout with
    --code, so that this command is there at every commit.

    Examples:
        git bisect start BAD GOOD

        git bisect run lmt bisect code /data/logs/my-run --step 1200 --code .
    """
    import json

    from lm_trainer.reproduce.bisect_code import STOP

    try:
        verdict = _check_code(run, step, overrides or [], checkout)
    except UserError as error:
        # 2, the usual exit code for wrong usage, would make git call the commit bad.
        clean.echo(f"error: {error}", err=True)
        raise typer.Exit(STOP) from None
    clean.echo(json.dumps(verdict.as_dict()) if as_json else verdict.sentence)
    raise typer.Exit(verdict.exit_code)


def _check_code(run: str, step: int, overrides: list[str], checkout: Path | None) -> Any:
    from lm_trainer.reproduce.bisect_code import check_code
    from lm_trainer.reproduce.record import RunRecord

    record = RunRecord.read(run)
    if not record.start < step <= record.last:
        raise UserError(f"--step {step}: {record.id} has recorded the steps {record.start + 1} to {record.last}")
    code = Path(__file__).resolve().parent.parent if checkout is None else checkout.absolute()
    return check_code(code, record.path, step, overrides)
