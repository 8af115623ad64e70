"""Results of `lmt eval` for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lm_trainer.evaluate.compare import SetComparison
from lm_trainer.evaluate.losses import Mean, SetLosses
from lm_trainer.evaluate.text import TextLosses

_HEADINGS = ("set", "documents", "tokens", "bytes", "loss", "perplexity", "bits/byte")


def text_lines(found: TextLosses) -> list[str]:
    """A table with a line for each set and each group."""
    rows = [_HEADINGS, *map(_set_row, found.sets)]
    for group in found.groups:
        name = group.name or "all sets"
        for kind, loss, bits in (
            ("micro", group.micro_loss, group.micro_bits_per_byte),
            ("macro", group.macro_loss, group.macro_bits_per_byte),
        ):
            rows.append((f"{name} ({kind})", "", "", "", _mean(loss), _perplexity(loss), _mean(bits)))
    return [*table(rows, left=1), *_rate_lines(found)]


def _rate_lines(found: TextLosses) -> list[str]:
    """A table of the error rates of sets that were heard, and a few of their texts."""
    if not found.rates:
        return []
    rows = [("set", "rows", "word errors", "normalised", "character errors")]
    for each in found.rates:
        normalised = "" if each.normalised_words is None else f"{each.normalised_words:.2%}"
        rows.append((each.name, f"{each.rows:,}", f"{each.words:.2%}", normalised, f"{each.characters:.2%}"))
    lines = ["", *table(rows, left=1)]
    for each in found.rates:
        lines += ["", f"{each.name}: said | written", *(f"  {said} | {written}" for said, written in each.examples)]
    return lines


def _set_row(each: SetLosses) -> tuple[str, ...]:
    documents = each.documents
    count = "" if documents.bytes is None else f"{documents.bytes:,.0f}"
    loss = documents.loss
    return (
        each.name,
        f"{len(documents.numbers_D):,}",
        f"{documents.tokens:,}",
        count,
        _mean(loss),
        _perplexity(loss),
        _mean(documents.bits_per_byte),
    )


def _mean(mean: Mean | None) -> str:
    # Of a set in which no token counts there is no mean.
    if mean is None or math.isnan(mean.value):
        return ""
    return f"{mean.value:.4f}" + ("" if math.isnan(mean.error) else f" ± {mean.error:.4f}")


def _perplexity(loss: Mean) -> str:
    value = perplexity(loss)
    return "" if math.isnan(value) else f"{value:,.2f}"


def perplexity(loss: Mean) -> float:
    """The exponential of a mean loss in nats; NaN where there is none."""
    return math.inf if loss.value >= 700 else math.exp(loss.value)


def comparison_lines(names: tuple[str, str], found: Sequence[SetComparison]) -> list[str]:
    """The difference on each set with its interval, and the documents where the models differ most."""
    lines = [f"{names[0]} less {names[1]}, paired by document, 95 % intervals"]
    rows = [("set", "documents", *names, "difference", "interval", "")]
    for each in found:
        low, high = each.interval
        better = "" if math.isnan(low) or low <= 0 <= high else f"{names[0] if high < 0 else names[1]} is better"
        rows.append(
            (
                each.name,
                f"{each.num_documents:,}",
                f"{each.first:.4f}",
                f"{each.second:.4f}",
                f"{each.difference.value:+.4f} {each.unit}",
                "needs two documents" if math.isnan(low) else f"[{low:+.4f}, {high:+.4f}]",
                better,
            )
        )
    lines += table(rows, left=1)
    for each in found:
        lines += ["", f"{each.name}: the documents that make most of the difference, in {each.unit}"]
        for document in each.worst:
            lines.append(f"  {document.difference:+.4f}  {document.first:.4f} {document.second:.4f}  {document.where}")
            lines.append(f"           | {document.excerpt[:100]}")
    return lines


def table(rows: Sequence[tuple[str, ...]], *, left: int) -> list[str]:
    """Rows as lines of equal columns, the first `left` of which are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def as_json(found: TextLosses) -> dict[str, Any]:
    """Everything that was found, for JSON."""
    groups = [
        {
            "name": group.name,
            "sets": list(group.members),
            **_json_mean("micro_loss", group.micro_loss),
            **_json_mean("macro_loss", group.macro_loss),
            **_json_mean("micro_bits_per_byte", group.micro_bits_per_byte),
            **_json_mean("macro_bits_per_byte", group.macro_bits_per_byte),
        }
        for group in found.groups
    ]
    sets = [_json_set(each) for each in found.sets]
    rates = [asdict(each) for each in found.rates]
    return {"sets": sets, "groups": groups, "notes": found.notes, **({"error_rates": rates} if rates else {})}


def _json_set(each: SetLosses) -> dict[str, Any]:
    documents = each.documents
    return {
        "name": each.name,
        "tags": list(each.tags),
        "documents": len(documents.numbers_D),
        "tokens": documents.tokens,
        "bytes": documents.bytes,
        **_json_mean("loss", documents.loss),
        "perplexity": perplexity(documents.loss),
        **_json_mean("bits_per_byte", documents.bits_per_byte),
    }


def _json_mean(name: str, mean: Mean | None) -> dict[str, float | None]:
    value, error = (None, None) if mean is None else mean
    return {name: value, f"{name}_error": error}


def document_records(found: TextLosses) -> list[dict[str, Any]]:
    """The losses of every document, each with its place in the source."""
    records = []
    for each in found.sets:
        documents = each.documents
        for index, number in enumerate(documents.numbers_D):
            records.append(
                {
                    "set": each.name,
                    "where": each.held_out.passage(int(number), 1).where,
                    "nats": float(documents.nats_D[index]),
                    "tokens": float(documents.tokens_D[index]),
                    "bytes": None if documents.bytes_D is None else float(documents.bytes_D[index]),
                }
            )
    return records
