"""`lmt replay`: recomputes one step of a run, and shows its gradients and hardest tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import clean
from cli.common import CharsOption, OverridesArgument, RunArgument, check_is_run, path_option
from lm_trainer.core.errors import UserError

if TYPE_CHECKING:
    from lm_trainer.reproduce.record import RunRecord
    from lm_trainer.reproduce.replay import Norms, Replay
    from lm_trainer.reproduce.tokens import HardToken


def replay(
    ctx: typer.Context,
    run: RunArgument,
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", help="The step, as in metrics.jsonl: counted from 1.", show_default=False),
    ] = None,
    metrics: Annotated[bool, typer.Option("--metrics", help="Recompute all lost metrics, and restore them.")] = False,
    overrides: OverridesArgument = None,
    show_batch: Annotated[bool, typer.Option("--show-batch", help="Print the batch's documents.")] = False,
    chars: CharsOption = 200,
    dump_grads: Annotated[
        Path | None,
        path_option(
            "--dump-grads", metavar="DIR", help="Write the gradients to DIR/gradients-N.safetensors (N is the step)."
        ),
    ] = None,
    top_k: Annotated[
        int, typer.Option("--top-k", metavar="K", min=1, help="Number of tokens and parameters to show.")
    ] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with all parameters.")] = False,
) -> None:
    """Recompute one step of a run, and show recorded and new metrics, norms per parameter, and the hardest tokens.

    Use it for a loss spike, or for the step at which a non-finite loss stopped the run. Starts from the nearest earlier
    checkpoint, and does not modify the run. Overrides may change settings that do not affect the results, such as
    devices.

    --metrics recomputes the steps whose lines are missing from metrics.jsonl, from checkpoint to checkpoint. It
    restores losses, evaluations and fingerprints if the fingerprints of the checkpoints are reproduced.

    Examples:
        lmt replay my-run --step 12345 --show-batch

        lmt replay my-run --step 12345 --dump-grads grads --json

        lmt replay my-run --metrics
    """
    if (step is None) == (not metrics):
        raise UserError("name a step by --step N, or give --metrics")
    from lm_trainer.core.runtime import prepare_process

    # Called before jax is imported, because it configures jax's allocator and threads.
    prepare_process()
    check_is_run(ctx, run)
    import sys

    from lm_trainer.core.terminal import json_line
    from lm_trainer.reproduce.record import RunRecord
    from lm_trainer.reproduce.replay import replay_step as run_replay
    from lm_trainer.reproduce.rerun import QuietProgress
    from lm_trainer.trackers.jsonl import encode_non_finite

    record = RunRecord.read(run)
    if step is None:
        _restore_metrics(record, overrides or [], as_json=as_json)
        return
    # Progress goes to stderr, so that the output can be piped.
    with QuietProgress(record.last, stream=sys.stderr) as progress:
        done = run_replay(
            record, step, top_k=top_k, dump_grads=dump_grads, overrides=overrides or [], progress=progress
        )
    if as_json:
        clean.echo(json_line(encode_non_finite(_replay_as_dict(done, show_batch=show_batch))))
        return
    for line in _replay_lines(record.id, done, top_k):
        clean.echo(line)
    if show_batch:
        from cli.data_at import describe_row

        for row in done.rows:
            clean.echo(describe_row(row, named=True, chars=chars))


def _restore_metrics(record: "RunRecord", overrides: list[str], *, as_json: bool) -> None:
    import json
    import sys
    from dataclasses import asdict

    from lm_trainer.reproduce.refill import refill_metrics
    from lm_trainer.reproduce.rerun import QuietProgress
    from lm_trainer.trackers.series import format_steps

    with QuietProgress(record.last, stream=sys.stderr) as progress:
        done = refill_metrics(record, overrides=overrides, progress=progress)
    if as_json:
        clean.echo(json.dumps(asdict(done)))
        return
    for file, names in done.lines.items():
        for name, steps in names.items():
            clean.echo(f"{record.path / file}: put back {name} of {format_steps(steps)}")
    for file, names in done.left.items():
        for name, steps in names.items():
            clean.echo(
                f"{record.path / file}: still lacks {name} of {format_steps(steps)}, which is not computed again"
            )
    if not (done.lines or done.left):
        clean.echo(f"{record.path}: no line is missing")


def _replay_lines(name: str, done: "Replay", top_k: int) -> Iterator[str]:
    from lm_trainer.reproduce.record import is_bitwise_equal

    yield f"run {name}, step {done.step}, reached from step {done.start}"
    yield f"  {'':24}{'recorded':>24}{'now':>24}"
    for key, value in done.now.items():
        recorded = done.recorded.get(key)
        verdict = "" if recorded is None else "equal" if is_bitwise_equal(recorded, value) else "differs"
        yield f"  {key:24}{'-' if recorded is None else repr(recorded):>24}{value!r:>24}  {verdict}"
    if not done.applied:
        yield "  the step was not applied: its loss or gradient is not finite"
    yield ""
    yield from _norm_lines(done.norms, top_k)
    yield ""
    yield "hardest tokens, in nats, for the weights before the step, without dropout"
    for token in done.tokens:
        yield f"  {token.loss:8.4f}  {format_in_context(token)}"
        yield f"            row {token.row}, position {token.position}, {done.source_of_token(token)}"
    if done.gradients:
        yield f"\ngradients: {done.gradients}"


def _norm_lines(norms: "dict[str, Norms]", top_k: int) -> Iterator[str]:
    # Gradients with NaNs come last, because NaNs have no order. A NaN is not equal to itself.
    ordered = sorted(
        norms.items(), key=lambda item: -item[1].gradient if item[1].gradient == item[1].gradient else -1e99
    )
    width = max(len(name) for name, _ in ordered[:top_k]) + 2
    yield f"{'parameter':{width}}{'gradient':>12}{'update':>12}{'weights':>12}{'update/weights':>16}"
    for name, norm in ordered[:top_k]:
        ratio = f"{norm.update / norm.parameter:.3g}" if norm.parameter else "-"
        yield f"{name:{width}}{norm.gradient:>12.4g}{norm.update:>12.4g}{norm.parameter:>12.4g}{ratio:>16}"
    if len(ordered) > top_k:
        yield f"and {len(ordered) - top_k} more, of smaller gradients (--top-k, --json)"


def format_in_context(token: "HardToken") -> str:
    """Returns a token in brackets between the tokens before and after it, on one line."""
    prefix, target, suffix = (
        text.replace("\n", "\\n").replace("\t", "\\t") for text in (token.before, token.token, token.after)
    )
    return f"{prefix}⟦{target}⟧{suffix}"


def _replay_as_dict(done: "Replay", *, show_batch: bool) -> dict[str, Any]:
    from dataclasses import asdict

    from cli.data_at import row_as_dict

    return {
        "step": done.step,
        "start": done.start,
        "applied": done.applied,
        "recorded": done.recorded,
        "now": done.now,
        "norms": {name: asdict(norms) for name, norms in done.norms.items()},
        "tokens": [token._asdict() | {"source": done.source_of_token(token)} for token in done.tokens],
        "gradients": None if done.gradients is None else str(done.gradients),
        **({"rows": [row_as_dict(row) for row in done.rows]} if show_batch else {}),
    }
