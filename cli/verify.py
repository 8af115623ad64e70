"""`lmt verify`: recomputes segments of a run, and compares them bit for bit."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import clean
from cli.common import JsonOption, OverridesArgument, RunArgument, check_is_run

if TYPE_CHECKING:
    from lm_trainer.reproduce.proof import Proof
    from lm_trainer.reproduce.record import RunRecord
    from lm_trainer.reproduce.verify import Segment

_COLUMNS = "{:<16}{:>8}{:>14}  {}"


def verify(
    ctx: typer.Context,
    run: RunArgument,
    overrides: OverridesArgument = None,
    segments: Annotated[
        int, typer.Option("--segments", metavar="K", min=1, help="Number of random segments to recompute.")
    ] = 1,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            help="Seed of the random choice; the same seed chooses the same segments.",
            show_default="random",
        ),
    ] = None,
    max_steps: Annotated[
        int | None,
        typer.Option("--max-steps", metavar="N", min=1, help="Maximum steps per segment.", show_default="all"),
    ] = None,
    signed_by: Annotated[
        str | None,
        typer.Option(
            "--signed-by",
            metavar="KEY",
            help="Public key that must have signed a proof: 64 hexadecimal digits, or a PEM file.",
            show_default="any key",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Recompute random segments of a run, from checkpoint to checkpoint, and compare the results bit for bit.

    Compares losses, gradient norms, and fingerprints of the parameters and the optimizer state. Does not modify the
    run, which may still be in progress, except that the result is appended to RUN_DIR/verified.jsonl. The devices may
    differ from the devices of the run, because overrides may change any setting that does not affect the results. Exit
    codes: 0 if all are equal, 1 at the first difference. Missing and changed lines of metrics are reported, but do not
    count as differences. RUN may be the directory of a proof (`lmt prove`), whose signature and data are checked first.

    Examples:
        lmt verify my-run --segments 3

        lmt verify my-run trainer.jax_config.jax_num_cpu_devices=4
    """
    from lm_trainer.core.runtime import prepare_process

    # Called before jax is imported, because it configures jax's allocator and threads.
    prepare_process()
    check_is_run(ctx, run)
    import json
    import random
    import sys

    from lm_trainer.reproduce.record import RunRecord
    from lm_trainer.reproduce.rerun import QuietProgress
    from lm_trainer.reproduce.verify import (
        append_result,
        choose_segments,
        environment_changes,
        find_segments,
        verify_segments,
    )
    from lm_trainer.trackers.jsonl import encode_non_finite

    proof = _open_proof(run, signed_by, as_json=as_json)
    record = RunRecord.read(run) if proof is None else proof.record
    # Chosen here and printed, so that the same segments can be verified later.
    seed = random.randrange(10**6) if seed is None else seed
    candidates = find_segments(record, max_steps)
    chosen = choose_segments(candidates, segments, seed)
    changes = environment_changes(record, chosen, overrides or [])
    # A proof has only the metrics that can be recomputed.
    warnings, metrics = _check_metrics(record) if proof is None else ([], {"missing": {}, "changed_metrics": None})
    if not as_json:
        _print_header(record.id, f"{len(chosen)} of {len(candidates)} segments, seed {seed}", warnings, changes)
    done: list[Segment] = []
    with QuietProgress(record.last, stream=sys.stderr) as progress:
        for segment in verify_segments(record, chosen, overrides=overrides or [], progress=progress):
            done.append(segment)
            if not as_json:
                _print_segment(segment)
    if proof is None and not append_result(record, done, seed) and not as_json:
        clean.echo(f"note: {record.path} cannot be written, so the outcome is not kept there")
    equal = done[-1].difference is None
    if as_json:
        content = {"run": record.id, "seed": seed, "equal": equal, "changes": changes, **metrics}
        content["signed_by"] = proof and proof.key
        # Existing scripts depend on the old key in the JSON.
        clean.echo(
            json.dumps(encode_non_finite(content | {"stretches": [_segment_as_dict(segment) for segment in done]}))
        )
    else:
        _print_result(done)
    if not equal:
        raise typer.Exit(1)


def _print_result(done: "list[Segment]") -> None:
    if difference := done[-1].difference:
        clean.echo(f"\nfirst difference: step {difference.step}, {difference.what}")
        clean.echo(f"  recorded {difference.recorded!r}\n  now      {difference.now!r}")
    else:
        clean.echo(f"equal, bit for bit: {sum(segment.steps for segment in done)} steps")


def _open_proof(run: str, signed_by: str | None, *, as_json: bool) -> "Proof | None":
    """Checks the signature, the digests and the data of a proof. Returns None if `run` is no proof."""
    import sys

    from lm_trainer.core.bucket import is_bucket
    from lm_trainer.core.errors import UserError
    from lm_trainer.reproduce.proof import check_data, is_proof, read_proof, summary_lines
    from lm_trainer.reproduce.rerun import QuietProgress, configure_as_recorded

    if is_bucket(run) or not is_proof(run):
        if signed_by is not None:
            raise UserError(f"--signed-by: {run} is no proof, which `lmt prove` writes")
        return None
    proof = read_proof(Path(run), signed_by)
    for line in () if as_json else summary_lines(proof):
        clean.echo(line)
    record = proof.record
    configure_as_recorded(record, record.load_config(record.last).trainer, record.last)
    with QuietProgress(record.last, stream=sys.stderr) as progress:
        check_data(proof, progress)
    return proof


def _check_metrics(record: "RunRecord") -> tuple[list[str], dict[str, Any]]:
    """Returns warnings about missing and changed lines of metrics, and the same for the JSON output."""
    from lm_trainer.reproduce.lost_metrics import find_changed_metrics, find_lost_metrics

    lost, changed = find_lost_metrics(record.path, record.checkpoints), find_changed_metrics(record)
    warnings = lost.describe_by_file(record.path, record.id) if lost else []
    if changed is not None:
        warnings.append(changed.describe(record.path, record.id))
    return warnings, {
        "missing": lost.lines if lost else {},
        "changed_metrics": [changed.first, changed.last] if changed else None,
    }


def _segment_as_dict(segment: "Segment") -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(segment) | {"difference": segment.difference and segment.difference._asdict()}


def _print_header(name: str, description: str, warnings: list[str], changes: list[str]) -> None:
    clean.echo(f"run {name}: {description}")
    for warning in warnings:
        clean.echo(f"warning: {warning}")
    if changes:
        clean.echo("what runs here is not what the run was computed with, so bits may differ:")
        for change in changes:
            clean.echo(f"  {change}")
    clean.echo(_COLUMNS.format("steps", "compared", "fingerprints", "result"))


def _print_segment(segment: "Segment") -> None:
    span = f"{segment.start + 1} to {segment.end}"
    clean.echo(_COLUMNS.format(span, segment.steps, segment.fingerprints, "differs" if segment.difference else "equal"))
    for note in segment.notes:
        clean.echo(f"  note: {note}")
