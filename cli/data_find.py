"""`lmt data find`: finds a text in the data of a run, and the steps that train on it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import clean
from cli.build_progress import build_progress
from cli.common import JsonOption, OverridesArgument, load_resolved_config, path_option, storage_argument
from cli.config_file import find_config_file
from cli.scan_progress import ScanProgress
from lm_trainer.core.errors import UserError

if TYPE_CHECKING:
    from lm_trainer.data.find import Occurrence, TrainedAt
    from lm_trainer.run.config.run_config import RunConfig

_STEPS = 8
"""Maximum number of steps that are listed per occurrence."""


def find(
    ctx: typer.Context,
    run: Annotated[
        str, storage_argument(metavar="RUN|CONFIG", help="A run, or a configuration file.", show_default=False)
    ],
    text: Annotated[
        str | None, typer.Argument(metavar="[TEXT]", help="The text to search for.", show_default=False)
    ] = None,
    overrides: OverridesArgument = None,
    *,
    file: Annotated[
        Path | None,
        path_option("--file", metavar="F", help="Search for the content of this file, without its last line break."),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=1, help="Occurrences to list; all are counted in any case.")
    ] = 20,
    as_json: JsonOption = False,
) -> None:
    """Find every document with a text in the data of a run, and the past and future steps that train on the text.

    Reads all tokens, including held-out sets. Compares the bytes of the tokenised text, regardless of token boundaries.
    Text without a cache is tokenised first.

    For example:

        lmt data find my-run "It was a bright cold day in April"

        lmt data find my.yaml --file canary.txt --json
    """
    words = list(overrides or [])
    if file is not None and text is not None:
        # With --file, the argument in the position of TEXT is a setting.
        words, text = [text, *words], None
    target = _read_text(file) if file is not None else text
    if not target:
        raise UserError("say what to look for: a text, or --file F")
    config, last = load_configuration_and_step(ctx, run, words)
    config.data.require_documents()
    from lm_trainer.data import open_data
    from lm_trainer.data.find import Tracer, find_text
    from lm_trainer.data.tokenizer.token_bytes import token_texts

    with build_progress() as show:
        data = open_data(config.data, seq_len=config.model.seq_len, seed=config.trainer.seed, on_progress=show)
    texts = token_texts(data.tokenizer)
    trainer = config.trainer
    tracer = Tracer(data, trainer.batch_schedule, trainer.num_train_steps, texts)
    matches: list[Occurrence] = []
    count, progress = 0, ScanProgress("tokens")
    for name, match in find_text(data, target, texts, progress):
        count += 1
        if len(matches) < limit:
            matches.append(tracer.trace(name, match))
            if not as_json:
                progress.clear()
                _print_occurrence(matches[-1], last, named=bool(config.data.configs))
    progress.clear()
    if as_json:
        clean.echo(
            json.dumps(
                {"occurrences": count, "last_step": last, "found": [_occurrence_as_dict(entry) for entry in matches]}
            )
        )
        return
    more = f", of which {limit} are listed (--limit)" if count > limit else ""
    clean.echo(f"{count:,} occurrence{'' if count == 1 else 's'}{more}")


def _read_text(file: Path) -> str:
    try:
        return file.read_text("utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read as UTF-8 text ({error})") from None


def load_configuration_and_step(ctx: typer.Context, run: str, overrides: list[str]) -> tuple["RunConfig", int | None]:
    """Returns the configuration of a run and its last step (None for a configuration file)."""
    if run.endswith((".yaml", ".yml")):
        return load_resolved_config(ctx, find_config_file(ctx, Path(run)), overrides), None
    import os

    from lm_trainer.reproduce.record import RunRecord

    record = RunRecord.read(run)
    # Relative paths in the configuration refer to the directory where the run was started.
    os.chdir(record.root)
    return record.load_config(record.last, overrides), record.last


def _print_occurrence(occurrence: "Occurrence", last: int | None, *, named: bool) -> None:
    # A single data set has no name.
    split = occurrence.cache if named else occurrence.cache.rpartition("/")[2]
    clean.echo(f"{split}: {occurrence.where}, document {occurrence.document}, character {occurrence.character}")
    clean.echo(f"  {_describe_steps(occurrence, last)}")


def _describe_steps(occurrence: "Occurrence", last: int | None) -> str:
    steps = occurrence.trained_at
    if occurrence.excluded:
        return "left out by data.exclude"
    if not occurrence.counts:
        return "does not count, by data.without"
    if not steps:
        return "held out" if occurrence.cache.endswith("validation") else "not trained on by the last step"
    past = [training for training in steps if last is None or training.step <= last]
    future = steps[len(past) :]
    verb = "in" if last is None else "trained on in"
    parts = [f"{verb} {_join_steps(past)}"] if past else []
    parts += [f"will be in {_join_steps(future)}"] if future else []
    return "; ".join(parts)


def _join_steps(steps: "list[TrainedAt] | tuple[TrainedAt, ...]") -> str:
    shown = ", ".join(
        f"step {training.step} (row {training.row}, epoch {training.epoch})" for training in steps[:_STEPS]
    )
    return shown + (f" and {len(steps) - _STEPS} more" if len(steps) > _STEPS else "")


def _occurrence_as_dict(occurrence: "Occurrence") -> dict:
    match = occurrence.match._asdict()
    return {
        **occurrence._asdict(),
        "match": match,
        "trained_at": [training._asdict() for training in occurrence.trained_at],
    }
