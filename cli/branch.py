"""`lmt branch`: starts a run that shares the steps of another run, or checks that steps come out equal again."""

from typing import TYPE_CHECKING, Annotated

import typer

from cli import clean
from cli.common import OverridesArgument, RunArgument, check_is_run
from cli.train import train_to_end
from lm_trainer.core.errors import UserError

if TYPE_CHECKING:
    from lm_trainer.reproduce.branch import BranchPlan
    from lm_trainer.reproduce.record import RunRecord


def branch(
    ctx: typer.Context,
    run: RunArgument,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The run id of the branch.", show_default=False)
    ] = None,
    overrides: OverridesArgument = None,
    at: Annotated[
        int,
        typer.Option("--at", metavar="STEP", help="Number of completed steps to share with RUN.", show_default=False),
    ] = ...,  # pyright: ignore[reportArgumentType]
    check: Annotated[
        int | None,
        typer.Option(
            "--check", metavar="N", min=1, help="Instead, compute the N steps after STEP again, and compare all bits."
        ),
    ] = None,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Create the branch and its first checkpoint, but do not train.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --check or --prepare, print one JSON object.")] = False,
) -> None:
    """Start a run that shares the steps of RUN up to STEP, and continue with changed settings.

    Begins from the checkpoint of STEP. Without one, computes the steps from the nearest earlier checkpoint again, and
    compares them with the recorded ones. RUN is not modified, may still be in progress, and keeps the checkpoint while
    the branch needs it. The same command resumes the branch, and so does `lmt train` with the config.yaml in its
    directory. Changes that make no sense after STEP are refused: another tokenizer, other shapes of weights, other
    initial weights, other batch sizes before STEP.

    --check makes no branch: use it before other code or another machine takes over a long run. Settings may then only
    change what does not affect the results, such as devices. Exit codes of --check: 0 if all bits are equal, otherwise
    1. Without --check, the exit codes are the same as for `lmt train`.

    Examples:
        lmt branch my-run --at 8000 half-rate optimizer.learning_rate=1e-4

        lmt branch my-run --at 8000 --check 200
    """
    from lm_trainer.core.runtime import prepare_process

    # Called before jax is imported, because it configures jax's allocator and threads.
    tuned = prepare_process()
    check_is_run(ctx, run)
    from lm_trainer.reproduce.record import RunRecord

    settings = list(overrides or [])
    record = RunRecord.read(run)
    if check is not None:
        _check(record, at, check, [*_name_as_setting(name), *settings], as_json)
        return
    if name is None or "=" in name or name.startswith("-"):
        raise UserError("NAME is missing: `lmt branch RUN --at STEP NAME [KEY=VALUE]...`")
    if as_json and not prepare:
        raise UserError("--json needs --check or --prepare; a run that trains writes metrics.jsonl and summary.json")
    from lm_trainer.reproduce.branch import plan_branch

    _start(plan_branch(record, at, name, settings), tuned, prepare=prepare, as_json=as_json)


def _name_as_setting(name: str | None) -> list[str]:
    """Returns the first setting, which takes the place of NAME in a check."""
    if name is not None and "=" not in name and not name.startswith("-"):
        raise UserError(f"{name}: --check makes no branch, so it has no name; remove one of them")
    return [] if name is None else [name]


def _start(plan: "BranchPlan", notes: list[str], *, prepare: bool, as_json: bool) -> None:
    import contextlib
    import json
    import sys

    from lm_trainer.reproduce.branch import prepare_branch
    from lm_trainer.reproduce.rerun import QuietProgress

    if plan.replayed:
        source = f"the checkpoint of step {plan.point.checkpoint}" if plan.point.checkpoint else "the start"
        clean.echo(f"{plan.replayed} steps of {plan.record.id} to compute again, from {source}", err=True)
    with QuietProgress(plan.point.step, stream=sys.stderr) as progress:
        directory = prepare_branch(plan, progress)
    if not prepare:
        with contextlib.chdir(plan.record.root):
            train_to_end(plan.config, directory / "config.yaml", [], notes)
    elif as_json:
        content = {"run": plan.name, "directory": str(directory), "replayed": plan.replayed, **plan.point.to_record()}
        clean.echo(json.dumps(content))
    else:
        clean.echo("\n".join([*plan.point.notes(), f"to start it: lmt train {directory / 'config.yaml'}"]))


def _check(record: "RunRecord", at: int, count: int, overrides: list[str], as_json: bool) -> None:
    import json
    import sys

    from lm_trainer.reproduce.branch import check_steps
    from lm_trainer.reproduce.rerun import QuietProgress
    from lm_trainer.reproduce.verify import Segment, environment_changes
    from lm_trainer.trackers.jsonl import encode_non_finite

    changes = environment_changes(record, [Segment(at, at + count)], overrides)
    with QuietProgress(at + count, stream=sys.stderr) as progress:
        segment = check_steps(record, at, count, overrides=overrides, progress=progress)
    difference = segment.difference
    if as_json:
        content = {
            "run": record.id,
            "start": segment.start,
            "end": segment.end,
            "steps": segment.steps,
            "fingerprints": segment.fingerprints,
            "equal": difference is None,
            "difference": difference and difference._asdict(),
            "changes": changes,
        }
        clean.echo(json.dumps(encode_non_finite(content)))
    else:
        if changes:
            clean.echo("\n  ".join(["what runs here is not what the run was computed with:", *changes]))
        clean.echo(f"run {record.id}: steps {segment.start + 1} to {segment.end}")
        for note in segment.notes:
            clean.echo(f"  note: {note}")
        if difference is None:
            clean.echo(f"equal, bit for bit: {segment.steps} steps, {segment.fingerprints} fingerprints")
        else:
            clean.echo(f"first difference: step {difference.step}, {difference.what}")
            clean.echo(f"  recorded {difference.recorded!r}\n  now      {difference.now!r}")
    if difference is not None:
        raise typer.Exit(1)
