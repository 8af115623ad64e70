"""`lmt data at`: prints the training data of a step."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import clean
from cli.build_progress import build_progress
from cli.common import CharsOption, ConfigArgument, JsonOption, OverridesArgument, load_resolved_config

if TYPE_CHECKING:
    from lm_trainer.data.provenance import RowDocuments


def at(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    step: Annotated[
        int, typer.Option("--step", metavar="N", min=1, help="The step, as in metrics.jsonl: counted from 1.")
    ] = 1,
    row: Annotated[
        int | None,
        typer.Option("--row", metavar="R", min=0, help="One row of its batch, counted from 0.", show_default="all"),
    ] = None,
    chars: CharsOption = 200,
    as_json: JsonOption = False,
) -> None:
    """Print the documents that a step trains on: the source, first token and text of each.

    Text without a cache is tokenised first. With --json, texts are complete.

    For example:

        lmt data at my.yaml --step 12000 --row 3
    """
    import json

    run = load_resolved_config(ctx, config, overrides)
    from lm_trainer.data import open_data
    from lm_trainer.data.provenance import documents_of_step

    # Opening the data tokenises text without a cache.
    with build_progress() as show:
        data = open_data(run.data, seq_len=run.model.seq_len, seed=run.trainer.seed, on_progress=show)
    if step > run.trainer.num_train_steps:
        clean.echo(f"the run ends after step {run.trainer.num_train_steps}; a longer one would go on so:", err=True)
    rows = documents_of_step(data, run.trainer.batch_schedule, step, row)
    if as_json:
        clean.echo(json.dumps({"step": step, "rows": [row_as_dict(traced) for traced in rows]}))
        return
    for traced in rows:
        clean.echo(f"step {step}, {describe_row(traced, named=bool(run.data.configs), chars=chars)}")


def describe_row(traced: "RowDocuments", *, named: bool, chars: int) -> str:
    """Describes the origin of a row of a batch, and its passages.

    Args:
        traced: the row.
        named: prints the name of the row's data set.
        chars: number of characters to show of each passage; 0 means all.
    """
    origin = traced.origin
    of_set = f" of {origin.set.name}" if named else ""
    lines = [f"row {traced.row}: row {origin.row}{of_set}, epoch {origin.epoch}"]
    for passage in traced.passages:
        lines.append(f"  {passage.where}, {passage.tokens} tokens from {passage.offset} on:")
        truncate = chars and len(passage.text) > chars
        # The text may contain terminal control sequences.
        text = passage.text[:chars] + " ..." if truncate else passage.text
        lines += [f"    | {line}" for line in text.splitlines()]
    return "\n".join(lines)


def row_as_dict(traced: "RowDocuments") -> dict[str, Any]:
    """Returns the origin of a row of a batch, and its passages, as plain data."""
    origin = traced.origin
    passages = [passage._asdict() for passage in traced.passages]
    return {
        "row": traced.row,
        "set": origin.set.name,
        "epoch": origin.epoch,
        "of_set": origin.row,
        "passages": passages,
    }
