"""`lmt eval`: evaluates a model on texts and tasks, and compares two models."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from cli import clean
from cli.build_progress import build_progress
from cli.common import (
    CheckpointOption,
    JsonOption,
    ModelArgument,
    OverridesArgument,
    path_option,
    place_option,
    refuse_settings_as_values,
)

if TYPE_CHECKING:
    from lm_trainer.evaluate.model import EvalModel
    from lm_trainer.harness.run import Tasks


def evaluate(
    ctx: typer.Context,
    model: ModelArgument,
    overrides: OverridesArgument = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="TEXT",
            help="A configuration whose data section names held-out text, or a file or URL of text; repeatable.",
            show_default="the held-out text of the run",
        ),
    ] = None,
    step: CheckpointOption = None,
    weights: Annotated[
        Literal["averaged", "raw"],
        typer.Option("--weights", help="The moving average of the weights if the run keeps one, or the raw weights."),
    ] = "averaged",
    context: Annotated[
        int | None,
        typer.Option(
            "--context", metavar="N", min=1, help="Tokens per row.", show_default="as in training; else 2048 at most"
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride",
            metavar="N",
            min=1,
            help="Start a row every N tokens; tokens predicted in an earlier row serve as context only.",
            show_default="a row's length",
        ),
    ] = None,
    max_batches: Annotated[
        int | None,
        typer.Option(
            "--max-batches", metavar="N", min=1, help="Evaluate at most N batches of each set.", show_default="all"
        ),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            metavar="NAME,...",
            help="Tasks, groups or tags of lm-evaluation-harness; text is then evaluated only if --data is given.",
        ),
    ] = None,
    tasks_dir: Annotated[
        Path | None,
        path_option("--tasks-dir", metavar="DIR", help="Directory with more tasks, as YAML files of the harness."),
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(
            "--num-fewshot", metavar="N", min=0, help="Few-shot examples per question.", show_default="the task's"
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", metavar="N", min=1, help="Evaluate the first N questions of each task.", show_default="all"
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--apply-chat-template", help="Format questions with the tokenizer's chat template.")
    ] = False,
    samples: Annotated[
        Path | None, path_option("--log-samples", metavar="DIR", help="Write questions and answers to DIR.")
    ] = None,
    compare: Annotated[
        str | None,
        place_option("--compare", metavar="OTHER", help="Another model to evaluate on the same text."),
    ] = None,
    documents: Annotated[
        Path | None,
        path_option("--documents", metavar="OUT", help="Write the loss of every document to OUT, as JSON lines."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a model: loss, perplexity and bits per byte of held-out text, with standard errors.

    Text is read in rows, as in training, so the loss on a run's own held-out text equals the loss that the run
    reported. Bits per byte is the loss of all predicted tokens in bits, divided by the number of UTF-8 bytes of their
    text. It makes models with different tokenizers comparable. A set with tags counts in the average of each of its
    tags. Micro averages weight sets by tokens, and macro averages weight sets equally. The figures do not depend on the
    number of devices. For OTHER, and by default for MODEL, the newest checkpoint is used, with averaged weights if
    available. To choose a step, pass checkpoints/ID/STEP.

    For example:

        lmt eval my-run

        lmt eval path/to/hf-model --data books.jsonl --data code.txt --stride 512

        lmt eval my-run --compare other-run --data my.yaml --json

        lmt eval my-run --tasks arc_easy,hellaswag --num-fewshot 5 --limit 200
    """
    from lm_trainer.core.runtime import prepare_process

    # Called before jax is imported, because it configures jax's allocator and threads.
    prepare_process()

    # Comes first, before the import of any package that the harness also uses.
    harness_tasks = _read_tasks(tasks, tasks_dir, num_fewshot=num_fewshot, limit=limit, chat=chat, samples=samples)
    refuse_settings_as_values(ctx)
    from lm_trainer.core.terminal import json_line
    from lm_trainer.evaluate.model import open_eval_model
    from lm_trainer.trackers.jsonl import encode_non_finite

    settings = overrides or []
    opened = open_eval_model(model, step=step, averaged=weights == "averaged", context=context, overrides=settings)
    result: dict[str, Any] = {"model": opened.name, "step": opened.step}
    lines, notes = [f"{opened.name}{'' if opened.step is None else f', step {opened.step}'}"], []
    if harness_tasks is None or data or compare:
        other = None if compare is None else partial(open_eval_model, compare, context=context, overrides=settings)
        text_result = _evaluate_on_text(model, opened, other, data or [], (stride, max_batches), documents)
        result, lines, notes = {**result, **text_result.result}, [*lines, *text_result.lines], text_result.notes
    if harness_tasks is not None:
        result["tasks"], table = _evaluate_on_tasks(opened, harness_tasks, samples)
        lines += table
    if as_json:
        clean.echo(json_line(encode_non_finite({**result, "notes": notes})))
        return
    for note in notes:
        clean.secho(f"note: {note}", err=True, fg=typer.colors.YELLOW)
    clean.echo("\n".join(lines))


class _TextResult(NamedTuple):
    result: dict[str, Any]
    lines: list[str]
    notes: list[str]


def _evaluate_on_text(
    source: str,
    model: "EvalModel",
    open_other: "Callable[[], EvalModel] | None",
    data: list[str],
    options: tuple[int | None, int | None],
    documents: Path | None,
) -> _TextResult:
    import json

    from lm_trainer.core.files import write_atomically
    from lm_trainer.evaluate import report
    from lm_trainer.evaluate.text import TextOptions, choose_text, compare_text, evaluate_text
    from lm_trainer.trackers.jsonl import encode_non_finite

    text, text_options = choose_text(source, model, data), TextOptions(*options)
    with build_progress() as show:
        losses = evaluate_text(model, text, text_options, show)
    result, lines = report.as_json(losses), report.text_lines(losses)
    if open_other is not None:
        other = open_other()
        with build_progress() as show:
            other_losses = evaluate_text(other, text, text_options, show)
        differences = compare_text(model, other, losses, other_losses)
        result["compared_with"] = {"model": other.name, "step": other.step, **report.as_json(other_losses)}
        result["differences"] = [item.as_json() for item in differences]
        lines += ["", *report.comparison_lines((model.name, other.name), differences)]
    if documents is not None:
        records = report.document_records(losses)
        write_atomically(documents, "".join(json.dumps(encode_non_finite(item)) + "\n" for item in records))
    return _TextResult(result, lines, losses.notes)


def _read_tasks(
    names: list[str] | None,
    directory: Path | None,
    *,
    num_fewshot: int | None,
    limit: int | None,
    chat: bool,
    samples: Path | None,
) -> "Tasks | None":
    """Reads the tasks before the model is loaded, so that an unknown name fails immediately."""
    from lm_trainer.core.errors import UserError
    from lm_trainer.harness.config import HarnessConfig, check_harness_installed, disable_progress_bars

    if not names:
        if directory or num_fewshot is not None or limit or chat or samples:
            raise UserError("name the tasks that this option is for: --tasks NAME,...")
        return None
    try:
        check_harness_installed()
    except ValueError as error:
        raise UserError(f"--tasks: {error}") from None
    disable_progress_bars()
    from lm_trainer.harness.run import Tasks

    listed = tuple(name for argument in names for name in argument.split(",") if name)
    config = HarnessConfig(
        task_spec=listed,
        include_path=None if directory is None else str(directory),
        max_examples=limit,
        apply_chat_template=chat,
        log_samples=samples is not None,
    )
    return Tasks(config, num_fewshot=num_fewshot)


def _evaluate_on_tasks(
    model: "EvalModel", tasks: "Tasks", samples: Path | None
) -> tuple[list[dict[str, Any]], list[str]]:
    from lm_trainer.evaluate.report import format_table
    from lm_trainer.harness.model import HarnessModel
    from lm_trainer.harness.report import task_json, task_rows, write_samples

    dtype = model.config.trainer.mp.compute_dtype
    harness_model = HarnessModel(model.decoder(), model.tokenizer, settings=model.settings, dtype=dtype)
    results = tasks.evaluate_model(harness_model)
    if samples is not None:
        write_samples(samples, results)
    return task_json(results), format_table(task_rows(results), left=1)
