"""`lmt verify`: computes parts of a run again, and compares bits."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import clean
from cli.common import JsonOption, OverridesArgument, RunArgument, check_is_run

if TYPE_CHECKING:
    from lm_trainer.reproduce.verify import Segment

_COLUMNS = "{:<16}{:>8}{:>14}  {}"


def verify(
    run: RunArgument,
    overrides: OverridesArgument = None,
    segments: Annotated[
        int, typer.Option("--segments", metavar="K", min=1, help="Compute so many segments again, drawn at random.")
    ] = 1,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", help="The same seed draws the same segments.", show_default="new"),
    ] = None,
    max_steps: Annotated[
        int | None,
        typer.Option("--max-steps", metavar="N", min=1, help="Stop a segment after so many steps.", show_default="all"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compute random segments of a run again, from checkpoint to checkpoint, and compare what comes out bit for bit.

    Losses, gradient norms, fingerprints of the parameters and the optimizer's state are compared. Nothing of the run,
    which may be going on, is changed; the outcome is added to RUN_DIR/verified.jsonl. The devices may be others than
    the run's: settings may change whatever changes no number. Exit codes: 0 all equal, 1 with the first difference.
    Lines of metrics that the run has lost are named; they are no difference.

    Examples:
        lmt verify my-run --segments 3

        lmt verify my-run trainer.jax_config.jax_num_cpu_devices=4
    """
    from lm_trainer.core.runtime import prepare_process

    # Before anything imports jax, whose allocator and threads it sets.
    prepare_process()
    check_is_run(run)
    import json
    import random
    import sys

    from lm_trainer.reproduce.lost_metrics import lost_lines
    from lm_trainer.reproduce.record import RunRecord
    from lm_trainer.reproduce.rerun import QuietProgress
    from lm_trainer.reproduce.verify import (
        choose_segments,
        environment_changes,
        find_segments,
        verify_segments,
        write_down,
    )
    from lm_trainer.trackers.jsonl import encode

    record = RunRecord.read(run)
    # Drawn here and printed, so that the same segments can be verified again.
    seed = random.randrange(10**6) if seed is None else seed
    found = find_segments(record, max_steps)
    chosen = choose_segments(found, segments, seed)
    changes = environment_changes(record, chosen, overrides or [])
    lost = lost_lines(record.path, record.checkpoints)
    if not as_json:
        gaps = lost.named(record.path, record.id) if lost else []
        _begin(record.id, f"{len(chosen)} of {len(found)} segments, seed {seed}", gaps, changes)
    done: list[Segment] = []
    with QuietProgress(record.last, stream=sys.stderr) as progress:
        for segment in verify_segments(record, chosen, overrides=overrides or [], progress=progress):
            done.append(segment)
            if not as_json:
                _show(segment)
    if not write_down(record, done, seed) and not as_json:
        clean.echo(f"note: {record.path} cannot be written, so the outcome is not kept there")
    differs = done[-1].difference
    if as_json:
        content = {"run": record.id, "seed": seed, "equal": not differs, "changes": changes}
        content["missing"] = lost.lines if lost else {}
        # The key is older than the word: scripts read it.
        clean.echo(json.dumps(encode(content | {"stretches": [_plain(segment) for segment in done]})))
    elif differs:
        clean.echo(f"\nfirst difference: step {differs.step}, {differs.what}")
        clean.echo(f"  recorded {differs.recorded!r}\n  now      {differs.now!r}")
    else:
        clean.echo(f"equal, bit for bit: {sum(segment.steps for segment in done)} steps")
    if differs:
        raise typer.Exit(1)


def _plain(segment: "Segment") -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(segment) | {"difference": segment.difference and segment.difference._asdict()}


def _begin(name: str, what: str, gaps: list[str], changes: list[str]) -> None:
    clean.echo(f"run {name}: {what}")
    for gap in gaps:
        clean.echo(f"warning: {gap}")
    if changes:
        clean.echo("what runs here is not what the run was computed with, so bits may differ:")
        for change in changes:
            clean.echo(f"  {change}")
    clean.echo(_COLUMNS.format("steps", "compared", "fingerprints", "result"))


def _show(segment: "Segment") -> None:
    span = f"{segment.start + 1} to {segment.end}"
    clean.echo(_COLUMNS.format(span, segment.steps, segment.fingerprints, "differs" if segment.difference else "equal"))
    for note in segment.notes:
        clean.echo(f"  note: {note}")
