"""`lmt data dedup`: finds duplicate documents in the training text, and writes a list to exclude them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import clean
from cli.build_progress import build_progress
from cli.common import (
    CharsOption,
    ConfigArgument,
    JsonOption,
    OverridesArgument,
    load_run_config,
    path_option,
)
from cli.scan_progress import ScanProgress
from lm_trainer.core.terminal import json_line

if TYPE_CHECKING:
    from lm_trainer.data import Data
    from lm_trainer.data.dedup import DedupReport

OutputOption = Annotated[
    Path | None,
    path_option(
        "--output", "-o", metavar="FILE", help="Write the list for data.exclude to this file.", show_default=False
    ),
]


def dedup(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    exact: Annotated[
        bool, typer.Option("--exact", help="Find exact duplicates only (equal tokens); needs no extra package.")
    ] = False,
    threshold: Annotated[
        float,
        typer.Option("--threshold", metavar="S", min=0.2, max=1, help="Minimum Jaccard similarity of near duplicates."),
    ] = 0.7,
    ngram: Annotated[
        int, typer.Option("--ngram", metavar="N", min=1, help="Words per n-gram (shingle) that near duplicates share.")
    ] = 5,
    report: Annotated[bool, typer.Option("--report", help="List the groups of duplicates.")] = False,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Groups to list, largest first.")] = 10,
    chars: CharsOption = 120,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count exact and near duplicates among the documents of the training text, across all of its data sets.

    Keeps the first document of each group. --output writes all others to a list for data.exclude, so that training
    skips them; caches remain valid. MinHash finds near duplicates (extra `dedup`).

    For example:

        lmt data dedup my.yaml --report

        lmt data dedup my.yaml -o duplicates.jsonl && lmt train my.yaml data.exclude=duplicates.jsonl
    """
    run = load_run_config(ctx, config, overrides)
    from lm_trainer.data.dedup import find_duplicates
    from lm_trainer.data.tokenizer.token_bytes import token_texts

    data = open_train_data(run.data)
    texts = [] if exact else token_texts(data.tokenizer)
    progress = ScanProgress()
    result = find_duplicates(
        data, threshold=None if exact else threshold, ngram=ngram, texts_V=texts, progress=progress
    )
    progress.clear()
    if output is not None:
        write_exclusion_list(data, output, [duplicate.exclusion_entry() for duplicate in result.duplicates])
    groups = _groups_as_dicts(data, result, limit, chars) if report else []
    if as_json:
        clean.echo(json_line({**_totals_as_dict(result), **({"groups": groups} if report else {})}))
        return
    _print_report(result, groups, exact=exact, threshold=threshold)
    if output is not None:
        clean.echo(f"the list is in {output}; train without them by data.exclude: {output}")


def open_train_data(config: Any) -> "Data":
    """Opens the data of a configuration, for commands that work on documents rather than rows."""
    from lm_trainer.data import open_data

    config.require_documents()
    with build_progress() as show:
        # Rows of one token, so that data sets that are too short for longer rows can be compared as well.
        return open_data(config.model_copy(update={"packing": "concat"}), seq_len=1, seed=0, on_progress=show)


def write_exclusion_list(data: "Data", output: Path, entries: list[dict[str, Any]]) -> None:
    """Writes a list of documents to exclude, including documents that the configuration already excludes."""
    from lm_trainer.data.cache.exclusion import write_exclusions
    from lm_trainer.data.corpus import train_caches

    caches = train_caches(data)
    excluded = [
        {"set": name, "document": number, "why": "data.exclude"}
        for name, cache in caches.items()
        if cache.exclusion is not None
        for number in cache.exclusion.documents_N.tolist()
    ]
    write_exclusions(output, {name: cache.ledger for name, cache in caches.items()}, [*excluded, *entries])


def _totals_as_dict(result: "DedupReport") -> dict[str, Any]:
    kinds = {name: result.count_duplicates(exact=name == "exact") for name in ("exact", "near")}
    counts = {name: {"documents": documents, "tokens": tokens} for name, (documents, tokens) in kinds.items()}
    return {"documents": result.documents, "tokens": result.tokens, **counts}


def _groups_as_dicts(data: "Data", result: "DedupReport", limit: int, chars: int) -> list[dict[str, Any]]:
    from lm_trainer.data.corpus import Origins

    origins, groups = Origins(data), []
    for (name, document), copies in list(result.groups.items())[:limit]:
        location, text = origins.find_passage(name, document, chars)
        duplicates = [
            {
                "where": origins.find_passage(duplicate.set, duplicate.document, 0)[0],
                "similarity": round(duplicate.similarity, 3),
            }
            | {"why": "exact" if duplicate.exact else "near", "tokens": duplicate.tokens}
            for duplicate in copies[:limit]
        ]
        groups.append({"kept": location, "text": text, "documents": len(copies), "others": duplicates})
    return groups


def _print_report(result: "DedupReport", groups: list[dict[str, Any]], *, exact: bool, threshold: float) -> None:

    for group in groups:
        clean.echo(f"{group['kept']}: {group['documents']} more, of {group['text']!r}")
        for duplicate in group["others"]:
            similarity = "the same" if duplicate["why"] == "exact" else f"similarity {duplicate['similarity']:.2f}"
            clean.echo(f"  {duplicate['where']}: {similarity}, {duplicate['tokens']:,} tokens")
        if group["documents"] > len(group["others"]):
            clean.echo(f"  and {group['documents'] - len(group['others'])} more")
    clean.echo(f"{result.documents:,} documents, {result.tokens:,} tokens")
    for kind, description in (
        ("exact", "with the tokens of another"),
        ("near", f"near others (at least {threshold:g})"),
    ):
        if kind == "exact" or not exact:
            documents, tokens = result.count_duplicates(exact=kind == "exact")
            share = documents / max(result.documents, 1), tokens / max(result.tokens, 1)
            clean.echo(f"  {description}: {documents:,} documents ({share[0]:.1%}), {tokens:,} tokens ({share[1]:.1%})")
