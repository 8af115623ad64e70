"""`lmt data dedup`: documents of the training text that stand in it before, and a list of them to leave out."""

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
    path_option("--output", "-o", metavar="FILE", help="Write the list for data.exclude here.", show_default=False),
]


def dedup(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    exact: Annotated[
        bool, typer.Option("--exact", help="Only documents with the same tokens; needs no further package.")
    ] = False,
    threshold: Annotated[
        float,
        typer.Option("--threshold", metavar="S", min=0.2, max=1, help="Least similarity of near duplicates (Jaccard)."),
    ] = 0.7,
    ngram: Annotated[
        int, typer.Option("--ngram", metavar="N", min=1, help="Words of the runs that near duplicates share.")
    ] = 5,
    report: Annotated[bool, typer.Option("--report", help="List the groups of documents that are alike.")] = False,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Groups to list, the largest first.")] = 10,
    chars: CharsOption = 120,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count the documents of the training text that stand in it twice, exactly or nearly, over all of its sets.

    The first one of each group is kept. --output writes the others as a list that data.exclude names: training then
    leaves them out, and nothing is tokenised again. Near duplicates are found by MinHash (extra `dedup`).

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
    found = find_duplicates(data, threshold=None if exact else threshold, ngram=ngram, texts_V=texts, progress=progress)
    progress.clear()
    if output is not None:
        write_list(data, output, [each.entry() for each in found.duplicates])
    groups = _groups(data, found, limit, chars) if report else []
    if as_json:
        clean.echo(json_line({**_totals(found), **({"groups": groups} if report else {})}))
        return
    _show(found, groups, exact=exact, threshold=threshold)
    if output is not None:
        clean.echo(f"the list is in {output}; train without them by data.exclude: {output}")


def open_train_data(config: Any) -> "Data":
    """Opens the data of a configuration, for commands to which rows do not matter."""
    from lm_trainer.data import open_data

    config.need_documents()
    with build_progress() as show:
        # Rows of one token: data that make no longer one can be compared too.
        return open_data(config.model_copy(update={"packing": "concat"}), seq_len=1, seed=0, on_progress=show)


def write_list(data: "Data", output: Path, entries: list[dict[str, Any]]) -> None:
    """Writes a list of documents to leave out, together with those that the data leave out already."""
    from lm_trainer.data.cache.exclusion import write_exclusions
    from lm_trainer.data.corpus import train_caches

    caches = train_caches(data)
    before = [
        {"set": name, "document": number, "why": "data.exclude"}
        for name, cache in caches.items()
        if cache.exclusion is not None
        for number in cache.exclusion.documents_N.tolist()
    ]
    write_exclusions(output, {name: cache.ledger for name, cache in caches.items()}, [*before, *entries])


def _totals(found: "DedupReport") -> dict[str, Any]:
    kinds = {name: found.total(exact=name == "exact") for name in ("exact", "near")}
    counts = {name: {"documents": documents, "tokens": tokens} for name, (documents, tokens) in kinds.items()}
    return {"documents": found.documents, "tokens": found.tokens, **counts}


def _groups(data: "Data", found: "DedupReport", limit: int, chars: int) -> list[dict[str, Any]]:
    from lm_trainer.data.corpus import Origins

    origins, shown = Origins(data), []
    for (name, document), others in list(found.groups.items())[:limit]:
        where, text = origins.passage(name, document, chars)
        alike = [
            {"where": origins.passage(each.set, each.document, 0)[0], "similarity": round(each.similarity, 3)}
            | {"why": "exact" if each.exact else "near", "tokens": each.tokens}
            for each in others[:limit]
        ]
        shown.append({"kept": where, "text": text, "documents": len(others), "others": alike})
    return shown


def _show(found: "DedupReport", groups: list[dict[str, Any]], *, exact: bool, threshold: float) -> None:

    for group in groups:
        clean.echo(f"{group['kept']}: {group['documents']} more, of {group['text']!r}")
        for each in group["others"]:
            how = "the same" if each["why"] == "exact" else f"similarity {each['similarity']:.2f}"
            clean.echo(f"  {each['where']}: {how}, {each['tokens']:,} tokens")
        if group["documents"] > len(group["others"]):
            clean.echo(f"  and {group['documents'] - len(group['others'])} more")
    clean.echo(f"{found.documents:,} documents, {found.tokens:,} tokens")
    for kind, what in (("exact", "with the tokens of another"), ("near", f"near others (at least {threshold:g})")):
        if kind == "exact" or not exact:
            documents, tokens = found.total(exact=kind == "exact")
            share = documents / max(found.documents, 1), tokens / max(found.tokens, 1)
            clean.echo(f"  {what}: {documents:,} documents ({share[0]:.1%}), {tokens:,} tokens ({share[1]:.1%})")
