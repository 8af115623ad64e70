"""Results of `lmt eval` as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lm_trainer.evaluate.compare import SetComparison
from lm_trainer.evaluate.losses import Mean, SetLosses
from lm_trainer.evaluate.text import TextLosses

_HEADINGS = ("set", "documents", "tokens", "bytes", "loss", "perplexity", "bits/byte")


def text_lines(losses: TextLosses) -> list[str]:
    """Formats the losses as a table with one line per set and per group."""
    rows = [_HEADINGS, *map(_set_row, losses.sets)]
    for group in losses.groups:
        name = group.name or "all sets"
        for kind, loss, bits in (
            ("micro", group.micro_loss, group.micro_bits_per_byte),
            ("macro", group.macro_loss, group.macro_bits_per_byte),
        ):
            rows.append(
                (f"{name} ({kind})", "", "", "", _format_mean(loss), _format_perplexity(loss), _format_mean(bits))
            )
    return [*format_table(rows, left=1), *_rate_lines(losses)]


def _rate_lines(losses: TextLosses) -> list[str]:
    """Formats the error rates on speech sets as a table, followed by a few example texts."""
    if not losses.rates:
        return []
    rows = [("set", "rows", "word errors", "normalised", "character errors")]
    for rates in losses.rates:
        normalised = "" if rates.normalised_words is None else f"{rates.normalised_words:.2%}"
        rows.append((rates.name, f"{rates.rows:,}", f"{rates.words:.2%}", normalised, f"{rates.characters:.2%}"))
    lines = ["", *format_table(rows, left=1)]
    for rates in losses.rates:
        lines += [
            "",
            f"{rates.name}: said | written",
            *(f"  {reference} | {written}" for reference, written in rates.examples),
        ]
    return lines


def _set_row(losses: SetLosses) -> tuple[str, ...]:
    documents = losses.documents
    count = "" if documents.bytes is None else f"{documents.bytes:,.0f}"
    loss = documents.loss
    return (
        losses.name,
        f"{len(documents.numbers_D):,}",
        f"{documents.tokens:,}",
        count,
        _format_mean(loss),
        _format_perplexity(loss),
        _format_mean(documents.bits_per_byte),
    )


def _format_mean(mean: Mean | None) -> str:
    # A set in which no token is counted has no mean.
    if mean is None or math.isnan(mean.value):
        return ""
    return f"{mean.value:.4f}" + ("" if math.isnan(mean.error) else f" ± {mean.error:.4f}")


def _format_perplexity(loss: Mean) -> str:
    value = perplexity(loss)
    return "" if math.isnan(value) else f"{value:,.2f}"


def perplexity(loss: Mean) -> float:
    """Computes exp of a mean loss in nats; NaN if there is no mean."""
    return math.inf if loss.value >= 700 else math.exp(loss.value)


def comparison_lines(names: tuple[str, str], comparisons: Sequence[SetComparison]) -> list[str]:
    """Formats the difference on each set with its interval, and the documents on which the models differ most."""
    lines = [f"{names[0]} less {names[1]}, paired by document, 95 % intervals"]
    rows = [("set", "documents", *names, "difference", "interval", "")]
    for comparison in comparisons:
        low, high = comparison.interval
        better = "" if math.isnan(low) or low <= 0 <= high else f"{names[0] if high < 0 else names[1]} is better"
        rows.append(
            (
                comparison.name,
                f"{comparison.num_documents:,}",
                f"{comparison.first:.4f}",
                f"{comparison.second:.4f}",
                f"{comparison.difference.value:+.4f} {comparison.unit}",
                "needs two documents" if math.isnan(low) else f"[{low:+.4f}, {high:+.4f}]",
                better,
            )
        )
    lines += format_table(rows, left=1)
    for comparison in comparisons:
        lines += ["", f"{comparison.name}: the documents that make most of the difference, in {comparison.unit}"]
        for document in comparison.worst:
            lines.append(f"  {document.difference:+.4f}  {document.first:.4f} {document.second:.4f}  {document.where}")
            lines.append(f"           | {document.excerpt[:100]}")
    return lines


def format_table(rows: Sequence[tuple[str, ...]], *, left: int) -> list[str]:
    """Formats rows as aligned columns; the first `left` columns are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def as_json(losses: TextLosses) -> dict[str, Any]:
    """Returns all results as plain data for JSON."""
    groups = [
        {
            "name": group.name,
            "sets": list(group.members),
            **_mean_as_json("micro_loss", group.micro_loss),
            **_mean_as_json("macro_loss", group.macro_loss),
            **_mean_as_json("micro_bits_per_byte", group.micro_bits_per_byte),
            **_mean_as_json("macro_bits_per_byte", group.macro_bits_per_byte),
        }
        for group in losses.groups
    ]
    sets = [_set_as_json(item) for item in losses.sets]
    rates = [asdict(item) for item in losses.rates]
    return {"sets": sets, "groups": groups, "notes": losses.notes, **({"error_rates": rates} if rates else {})}


def _set_as_json(losses: SetLosses) -> dict[str, Any]:
    documents = losses.documents
    return {
        "name": losses.name,
        "tags": list(losses.tags),
        "documents": len(documents.numbers_D),
        "tokens": documents.tokens,
        "bytes": documents.bytes,
        **_mean_as_json("loss", documents.loss),
        "perplexity": perplexity(documents.loss),
        **_mean_as_json("bits_per_byte", documents.bits_per_byte),
    }


def _mean_as_json(name: str, mean: Mean | None) -> dict[str, float | None]:
    value, error = (None, None) if mean is None else mean
    return {name: value, f"{name}_error": error}


def document_records(losses: TextLosses) -> list[dict[str, Any]]:
    """Returns the loss of every document with the document's location in the source."""
    records = []
    for set_losses in losses.sets:
        documents = set_losses.documents
        for index, number in enumerate(documents.numbers_D):
            records.append(
                {
                    "set": set_losses.name,
                    "where": set_losses.held_out.first_passage(int(number), 1).where,
                    "nats": float(documents.nats_D[index]),
                    "tokens": float(documents.tokens_D[index]),
                    "bytes": None if documents.bytes_D is None else float(documents.bytes_D[index]),
                }
            )
    return records
