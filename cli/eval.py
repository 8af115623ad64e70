"""`lmt eval`: a model's losses on texts, and how two models differ."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from cli.build_progress import build_progress
from cli.common import CheckpointOption, JsonOption, ModelArgument, OverridesArgument, path_option, place_option


def evaluate(
    model: ModelArgument,
    overrides: OverridesArgument = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="TEXT",
            help="A configuration, whose data section names held-out text; or a file or URL of text, once or more.",
            show_default="the held-out text of the run",
        ),
    ] = None,
    step: CheckpointOption = None,
    weights: Annotated[
        Literal["averaged", "raw"],
        typer.Option("--weights", help="Average of a run that keeps one, or its weights themselves."),
    ] = "averaged",
    context: Annotated[
        int | None,
        typer.Option(
            "--context", metavar="N", min=1, help="Tokens in a row.", show_default="as in training; else 2048 at most"
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride",
            metavar="N",
            min=1,
            help="Begin a row every N tokens; what an earlier row predicted is only read.",
            show_default="a row's length",
        ),
    ] = None,
    max_batches: Annotated[
        int | None,
        typer.Option("--max-batches", metavar="N", min=1, help="Read so many batches of a set.", show_default="all"),
    ] = None,
    compare: Annotated[
        str | None,
        place_option("--compare", metavar="OTHER", help="Another model, on the same text."),
    ] = None,
    documents: Annotated[
        Path | None,
        path_option("--documents", metavar="OUT", help="Write the loss of every document there, as JSON lines."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a model: loss, perplexity and bits per byte of held-out text, with standard errors.

    The model reads the text in rows, as in training: the loss on a run's own text is the one that the run reports. Bits
    per byte are the bits of all predicted tokens over the UTF-8 bytes of their text, so that models with different
    tokenizers can be compared. A set that has tags counts in the averages of each; micro averages weigh tokens, macro
    averages weigh sets. The figures are the same on any number of devices. Of OTHER, as of MODEL by default, the newest
    checkpoint is taken, with averaged weights where there are some; name a step as checkpoints/ID/STEP.

    For example:

        lmt eval my-run

        lmt eval path/to/hf-model --data books.jsonl --data code.txt --stride 512

        lmt eval my-run --compare other-run --data my.yaml --json
    """
    from lm_trainer.core.runtime import prepare_process

    # Before anything imports jax, whose allocator and threads it sets.
    prepare_process()
    import json

    from lm_trainer.core.files import write_atomically
    from lm_trainer.evaluate import report
    from lm_trainer.evaluate.model import open_eval_model
    from lm_trainer.evaluate.text import TextOptions, choose_text, compare_text, evaluate_text
    from lm_trainer.trackers.jsonl import encode

    averaged, settings = weights == "averaged", overrides or []
    opened = open_eval_model(model, step=step, averaged=averaged, context=context, overrides=settings)
    text, options = choose_text(model, opened, data or []), TextOptions(stride, max_batches)
    with build_progress() as show:
        found = evaluate_text(opened, text, options, show)
    result = report.as_json(opened, found)
    lines = [f"{opened.name}{'' if opened.step is None else f', step {opened.step}'}", *report.text_lines(found)]
    if compare is not None:
        other = open_eval_model(compare, context=context, overrides=settings)
        with build_progress() as show:
            others = evaluate_text(other, text, options, show)
        differences = compare_text(opened, other, found, others)
        result["compared_with"] = report.as_json(other, others)
        result["differences"] = [each.as_json() for each in differences]
        lines += ["", *report.comparison_lines((opened.name, other.name), differences)]
    if documents is not None:
        records = report.document_records(found)
        write_atomically(documents, "".join(json.dumps(encode(each)) + "\n" for each in records))
    if as_json:
        typer.echo(json.dumps(encode(result), ensure_ascii=False))
        return
    for note in found.notes:
        typer.secho(f"note: {note}", err=True, fg=typer.colors.YELLOW)
    typer.echo("\n".join(lines))
