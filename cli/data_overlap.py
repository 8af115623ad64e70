"""`lmt data overlap`: how much of an evaluation set occurs in the training text."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import clean
from cli.common import JsonOption, OverridesArgument, storage_argument
from cli.data_dedup import OutputOption, open_train_data, write_exclusion_list
from cli.data_find import load_configuration_and_step
from cli.scan_progress import ScanProgress
from lm_trainer.core.errors import UserError
from lm_trainer.core.terminal import json_line

if TYPE_CHECKING:
    from lm_trainer.data.overlap import EvalDocument, OverlapReport


def overlap(
    ctx: typer.Context,
    run: Annotated[
        str, storage_argument(metavar="RUN|CONFIG", help="A run, or a configuration file.", show_default=False)
    ],
    evaluation: Annotated[
        str,
        typer.Argument(
            metavar="EVAL", help="Files of the evaluation set, as in data.validation_urls.", show_default=False
        ),
    ],
    overrides: OverridesArgument = None,
    *,
    text_key: Annotated[
        list[str] | None,
        typer.Option("--text-key", metavar="KEY", help="Field of a record with the text; repeatable."),
    ] = None,
    ngram: Annotated[int, typer.Option("--ngram", metavar="N", min=2, help="Words per n-gram to search for.")] = 13,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=0, help="Documents to list, longest overlapping span first.")
    ] = 20,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Report how much of an evaluation set occurs in a run's training text, per document and in total.

    Searches all training text for the n-grams of the evaluation set, ignoring case and punctuation. With n-grams of 13
    words, a document with any match is "dirty" as in the GPT-3 paper. The PaLM and Llama papers report the fraction of
    words covered, with --ngram 8. --output writes a list of the matching training documents for data.exclude.

    For example:

        lmt data overlap my-run arc_test.jsonl --text-key question

        lmt data overlap my.yaml test.jsonl --ngram 8 --json
    """
    config, _ = load_configuration_and_step(ctx, run, list(overrides or []))
    from lm_trainer.data.overlap import find_overlap
    from lm_trainer.data.tokenizer.token_bytes import token_texts

    documents = list(_read_eval_documents(evaluation, text_key or ["text"]))
    data = open_train_data(config.data)
    progress = ScanProgress()
    overlaps = find_overlap(data, documents, ngram=ngram, texts_V=token_texts(data.tokenizer), progress=progress)
    progress.clear()
    if output is not None:
        lines = [
            {"set": name, "document": number, "why": "overlap"}
            for name, numbers in overlaps.train_documents.items()
            for number in numbers.tolist()
        ]
        write_exclusion_list(data, output, lines)
    listed = _contaminated_as_dicts(data, overlaps, limit)
    if as_json:
        clean.echo(json_line({**_totals_as_dict(overlaps), "found": listed}))
        return
    _print_report(overlaps, listed)
    if output is not None:
        count = sum(map(len, overlaps.train_documents.values()))
        clean.echo(f"{count:,} training documents with such runs are in {output}; leave them out by data.exclude")


def _read_eval_documents(evaluation: str, keys: list[str]) -> "Iterator[EvalDocument]":
    from lm_trainer.data.overlap import EvalDocument
    from lm_trainer.data.sources import Row, list_shards
    from lm_trainer.data.sources.base import full_text

    one = keys[0] if len(keys) == 1 else "text"
    pieces: list[str] = []
    for shard in list_shards("validation", [evaluation], one, tuple(keys) if len(keys) > 1 else ()):
        for row in shard.rows():
            if not isinstance(row, Row):
                raise UserError(f"{row.where}: {row.reason.replace('data.text_key', '--text-key')}")
            pieces.append(full_text(row))
            if row.ends_document:
                yield EvalDocument(row.where, "".join(pieces))
                pieces = []


def _totals_as_dict(overlaps: "OverlapReport") -> dict[str, Any]:
    from lm_trainer.data.overlap import CLEAN, DIRTY

    return {
        "ngram": overlaps.ngram,
        "documents": len(overlaps.documents),
        "too_short": overlaps.too_short,
        "with_any": overlaps.count_at_least(0),
        f"with_{CLEAN:.0%}": overlaps.count_at_least(CLEAN),
        f"with_{DIRTY:.0%}": overlaps.count_at_least(DIRTY),
        "words_covered": overlaps.share,
        "train_documents": {name: len(numbers) for name, numbers in overlaps.train_documents.items()},
    }


def _contaminated_as_dicts(data: Any, overlaps: "OverlapReport", limit: int) -> list[dict[str, Any]]:
    from lm_trainer.data.corpus import Origins

    origins = Origins(data)
    contaminated = sorted(
        (document for document in overlaps.documents if document.covered), key=lambda document: -document.longest
    )
    return [
        {
            "where": document.where,
            "words": document.words,
            "covered": document.covered,
            "longest": document.longest,
            "span": document.span,
        }
        | {"train": [origins.find_passage(name, number, 0)[0] for name, number in document.found_in]}
        for document in contaminated[:limit]
    ]


def _print_report(overlaps: "OverlapReport", listed: list[dict[str, Any]]) -> None:
    from lm_trainer.data.overlap import CLEAN, DIRTY

    for document in listed:
        span = document["span"].replace("\n", " ")
        shown = span if len(span) <= 160 else f"{span[:157]}..."
        clean.echo(
            f"{document['where']}: {document['covered']} of {document['words']} words, {document['longest']} in a row"
        )
        clean.echo(f"  in {', '.join(document['train'])}: {shown}")
    total = max(len(overlaps.documents), 1)
    clean.echo(f"{len(overlaps.documents):,} documents, runs of {overlaps.ngram} words")
    for description, count in (
        ("with any run in the training text", overlaps.count_at_least(0)),
        (f"with {CLEAN:.0%} of their words or more", overlaps.count_at_least(CLEAN)),
        (f"with {DIRTY:.0%} of their words or more", overlaps.count_at_least(DIRTY)),
    ):
        clean.echo(f"  {description}: {count:,} ({count / total:.1%})")
    clean.echo(f"  of all words: {overlaps.share:.1%}")
    if overlaps.too_short:
        clean.echo(f"  of fewer words than a run, not looked for: {overlaps.too_short:,}")
