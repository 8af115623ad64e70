"""`lmt eval`: a model's losses on texts, and how two models differ."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from cli import clean
from cli.build_progress import build_progress
from cli.common import CheckpointOption, JsonOption, ModelArgument, OverridesArgument, path_option, place_option

if TYPE_CHECKING:
    from lm_trainer.evaluate.model import EvalModel
    from lm_trainer.harness.run import Tasks


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
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            metavar="NAME,...",
            help="Tasks of lm-evaluation-harness, groups or tags; the text is then left out unless --data names some.",
        ),
    ] = None,
    tasks_dir: Annotated[
        Path | None, path_option("--tasks-dir", metavar="DIR", help="More tasks, as YAML files of the harness.")
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(
            "--num-fewshot", metavar="N", min=0, help="Examples in front of a question.", show_default="the task's"
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="Ask N questions of a task.", show_default="all")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--apply-chat-template", help="Write questions in the tokenizer's chat template.")
    ] = False,
    samples: Annotated[
        Path | None, path_option("--log-samples", metavar="DIR", help="Write questions and answers there.")
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

        lmt eval my-run --tasks arc_easy,hellaswag --num-fewshot 5 --limit 200
    """
    from lm_trainer.core.runtime import prepare_process

    # Before anything imports jax, whose allocator and threads it sets.
    prepare_process()

    # First, before a package that the harness shares with others is imported.
    asked = _read_tasks(tasks, tasks_dir, num_fewshot=num_fewshot, limit=limit, chat=chat, samples=samples)
    from lm_trainer.core.terminal import json_line
    from lm_trainer.evaluate.model import open_eval_model
    from lm_trainer.trackers.jsonl import encode

    settings = overrides or []
    opened = open_eval_model(model, step=step, averaged=weights == "averaged", context=context, overrides=settings)
    result: dict[str, Any] = {"model": opened.name, "step": opened.step}
    lines, notes = [f"{opened.name}{'' if opened.step is None else f', step {opened.step}'}"], []
    if asked is None or data or compare:
        other = None if compare is None else partial(open_eval_model, compare, context=context, overrides=settings)
        found = _on_text(model, opened, other, data or [], (stride, max_batches), documents)
        result, lines, notes = {**result, **found.result}, [*lines, *found.lines], found.notes
    if asked is not None:
        result["tasks"], table = _on_tasks(opened, asked, samples)
        lines += table
    if as_json:
        clean.echo(json_line(encode({**result, "notes": notes})))
        return
    for note in notes:
        clean.secho(f"note: {note}", err=True, fg=typer.colors.YELLOW)
    clean.echo("\n".join(lines))


class _Found(NamedTuple):
    result: dict[str, Any]
    lines: list[str]
    notes: list[str]


def _on_text(
    source: str,
    model: "EvalModel",
    open_other: "Callable[[], EvalModel] | None",
    data: list[str],
    options: tuple[int | None, int | None],
    documents: Path | None,
) -> _Found:
    import json

    from lm_trainer.core.files import write_atomically
    from lm_trainer.evaluate import report
    from lm_trainer.evaluate.text import TextOptions, choose_text, compare_text, evaluate_text
    from lm_trainer.trackers.jsonl import encode

    text, how = choose_text(source, model, data), TextOptions(*options)
    with build_progress() as show:
        found = evaluate_text(model, text, how, show)
    result, lines = report.as_json(found), report.text_lines(found)
    if open_other is not None:
        other = open_other()
        with build_progress() as show:
            others = evaluate_text(other, text, how, show)
        differences = compare_text(model, other, found, others)
        result["compared_with"] = {"model": other.name, "step": other.step, **report.as_json(others)}
        result["differences"] = [each.as_json() for each in differences]
        lines += ["", *report.comparison_lines((model.name, other.name), differences)]
    if documents is not None:
        records = report.document_records(found)
        write_atomically(documents, "".join(json.dumps(encode(each)) + "\n" for each in records))
    return _Found(result, lines, found.notes)


def _read_tasks(
    names: list[str] | None,
    directory: Path | None,
    *,
    num_fewshot: int | None,
    limit: int | None,
    chat: bool,
    samples: Path | None,
) -> "Tasks | None":
    """Reads the tasks before the model, so that a name that there is not is found at once."""
    from lm_trainer.core.errors import UserError
    from lm_trainer.harness.config import HarnessConfig, check_package, quiet_bars

    if not names:
        if directory or num_fewshot is not None or limit or chat or samples:
            raise UserError("name the tasks that this option is for: --tasks NAME,...")
        return None
    try:
        check_package()
    except ValueError as error:
        raise UserError(f"--tasks: {error}") from None
    quiet_bars()
    from lm_trainer.harness.run import Tasks

    listed = tuple(name for each in names for name in each.split(",") if name)
    config = HarnessConfig(
        task_spec=listed,
        include_path=None if directory is None else str(directory),
        max_examples=limit,
        apply_chat_template=chat,
        log_samples=samples is not None,
    )
    return Tasks(config, num_fewshot=num_fewshot)


def _on_tasks(model: "EvalModel", tasks: "Tasks", samples: Path | None) -> tuple[list[dict[str, Any]], list[str]]:
    from lm_trainer.evaluate.report import table
    from lm_trainer.harness.model import HarnessModel
    from lm_trainer.harness.report import task_json, task_rows, write_samples

    dtype = model.config.trainer.mp.compute_dtype
    asked = HarnessModel(model.decoder(), model.tokenizer, settings=model.settings, dtype=dtype)
    found = tasks.ask(asked)
    if samples is not None:
        write_samples(samples, found)
    return task_json(found), table(task_rows(found), left=1)
