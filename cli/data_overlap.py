"""`lmt data overlap`: how much of an evaluation set stands in the training text."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import clean
from cli.common import JsonOption, OverridesArgument, place_argument
from cli.data_dedup import OutputOption, open_train_data, write_list
from cli.data_find import find_configuration
from cli.scan_progress import ScanProgress
from lm_trainer.core.errors import UserError
from lm_trainer.core.terminal import json_line

if TYPE_CHECKING:
    from lm_trainer.data.overlap import EvalDocument, OverlapReport


def overlap(
    ctx: typer.Context,
    run: Annotated[
        str, place_argument(metavar="RUN|CONFIG", help="A run, or the YAML file of one.", show_default=False)
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
        typer.Option("--text-key", metavar="KEY", help="The field of a record with the text; may be given again."),
    ] = None,
    ngram: Annotated[
        int, typer.Option("--ngram", metavar="N", min=2, help="Words of the runs that are looked for.")
    ] = 13,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=0, help="Documents to list, those with the longest spans first.")
    ] = 20,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say how much of an evaluation set stands in the training text of a run, document by document and in total.

    Runs of words (n-grams, without case and punctuation) are looked for in all training text. With 13 words, a document
    with any of them is what the report of GPT-3 calls dirty. Those of PaLM and Llama give the share of words that are
    covered, with --ngram 8. --output writes the training documents with such runs as a list for data.exclude.

    For example:

        lmt data overlap my-run arc_test.jsonl --text-key question

        lmt data overlap my.yaml test.jsonl --ngram 8 --json
    """
    config, _ = find_configuration(ctx, run, list(overrides or []))
    from lm_trainer.data.overlap import find_overlap
    from lm_trainer.data.tokenizer.token_bytes import token_texts

    documents = list(_documents(evaluation, text_key or ["text"]))
    data = open_train_data(config.data)
    progress = ScanProgress()
    found = find_overlap(data, documents, ngram=ngram, texts_V=token_texts(data.tokenizer), progress=progress)
    progress.clear()
    if output is not None:
        lines = [
            {"set": name, "document": number, "why": "overlap"}
            for name, numbers in found.train_documents.items()
            for number in numbers.tolist()
        ]
        write_list(data, output, lines)
    listed = _listed(data, found, limit)
    if as_json:
        clean.echo(json_line({**_totals(found), "found": listed}))
        return
    _show(found, listed)
    if output is not None:
        count = sum(map(len, found.train_documents.values()))
        clean.echo(f"{count:,} training documents with such runs are in {output}; leave them out by data.exclude")


def _documents(evaluation: str, keys: list[str]) -> "Iterator[EvalDocument]":
    from lm_trainer.data.overlap import EvalDocument
    from lm_trainer.data.sources import Row, shards_of_urls
    from lm_trainer.data.sources.base import all_text

    one = keys[0] if len(keys) == 1 else "text"
    pieces: list[str] = []
    for shard in shards_of_urls("validation", [evaluation], one, tuple(keys) if len(keys) > 1 else ()):
        for row in shard.rows():
            if not isinstance(row, Row):
                raise UserError(f"{row.where}: {row.reason.replace('data.text_key', '--text-key')}")
            pieces.append(all_text(row))
            if row.ends_document:
                yield EvalDocument(row.where, "".join(pieces))
                pieces = []


def _totals(found: "OverlapReport") -> dict[str, Any]:
    from lm_trainer.data.overlap import CLEAN, DIRTY

    return {
        "ngram": found.ngram,
        "documents": len(found.documents),
        "too_short": found.too_short,
        "with_any": found.count(0),
        f"with_{CLEAN:.0%}": found.count(CLEAN),
        f"with_{DIRTY:.0%}": found.count(DIRTY),
        "words_covered": found.share,
        "train_documents": {name: len(numbers) for name, numbers in found.train_documents.items()},
    }


def _listed(data: Any, found: "OverlapReport", limit: int) -> list[dict[str, Any]]:
    from lm_trainer.data.corpus import Origins

    origins = Origins(data)
    contaminated = sorted((each for each in found.documents if each.covered), key=lambda each: -each.longest)
    return [
        {"where": each.where, "words": each.words, "covered": each.covered, "longest": each.longest, "span": each.span}
        | {"train": [origins.passage(name, number, 0)[0] for name, number in each.found_in]}
        for each in contaminated[:limit]
    ]


def _show(found: "OverlapReport", listed: list[dict[str, Any]]) -> None:
    from lm_trainer.data.overlap import CLEAN, DIRTY

    for each in listed:
        span = each["span"].replace("\n", " ")
        shown = span if len(span) <= 160 else f"{span[:157]}..."
        clean.echo(f"{each['where']}: {each['covered']} of {each['words']} words, {each['longest']} in a row")
        clean.echo(f"  in {', '.join(each['train'])}: {shown}")
    total = max(len(found.documents), 1)
    clean.echo(f"{len(found.documents):,} documents, runs of {found.ngram} words")
    for what, count in (
        ("with any run in the training text", found.count(0)),
        (f"with {CLEAN:.0%} of their words or more", found.count(CLEAN)),
        (f"with {DIRTY:.0%} of their words or more", found.count(DIRTY)),
    ):
        clean.echo(f"  {what}: {count:,} ({count / total:.1%})")
    clean.echo(f"  of all words: {found.share:.1%}")
    if found.too_short:
        clean.echo(f"  of fewer words than a run, not looked for: {found.too_short:,}")
