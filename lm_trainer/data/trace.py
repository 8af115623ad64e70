"""What a step trains on: from a row of a batch back to the documents it was cut from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.core.steps import BatchSchedule
from lm_trainer.data.documents import read_lengths
from lm_trainer.data.layout import part_key
from lm_trainer.data.opened import Data, OpenSet
from lm_trainer.data.order import Origin
from lm_trainer.data.tokenizer import Tokenizer


class Passage(NamedTuple):
    """The part of a document that stands in a row."""

    where: str
    """Where the document came from: the file and the line or row."""
    offset: int
    """Tokens of the document before the passage."""
    tokens: int
    text: str


class TracedRow(NamedTuple):
    """One row of a global batch."""

    row: int
    """In the batch."""
    origin: Origin
    passages: list[Passage]


def trace(data: Data, schedule: BatchSchedule, step: int, row: int | None = None) -> Iterator[TracedRow]:
    """What the rows of one step hold, or one of them.

    Raises:
        UserError: if the data end before, or there is no such row.
    """
    size, most = schedule.at(step), data.max_steps(schedule)
    if most is not None and step >= most:
        raise UserError(f"the data end after {most} steps, by data.stop_strategy; there is no step {step}")
    if row is not None and not 0 <= row < size:
        raise UserError(f"the batch of step {step} has {size} rows, counted from 0; there is no row {row}")
    rows = np.arange(size) if row is None else np.array([row])
    origins = data.order(schedule).origins(schedule.rows_before(step) + rows)
    for number, origin in zip(rows.tolist(), origins, strict=True):
        cache = data.caches[f"{origin.set.name}/train"]
        spans = origin.set.rows.spans(origin.row)
        found = [passage for start, count in spans for passage in passages(cache, data.tokenizer, start, count)]
        yield TracedRow(number, origin, found)


def passages(cache: OpenSet, tokenizer: Tokenizer, start: int, count: int) -> Iterator[Passage]:
    """The documents, or parts of them, that the tokens [start, start + count) of a stream are."""
    ends = np.cumsum(np.asarray(cache.ledger.tokens, np.int64))
    part = int(np.searchsorted(ends, start, side="right"))
    while count:
        begin = int(ends[part]) - cache.ledger.tokens[part]
        pieces = np.cumsum(read_lengths(cache.store, cache.ledger.parts[part])) + begin
        for index in range(int(np.searchsorted(pieces, start, side="right")), len(pieces)):
            piece_start = int(pieces[index - 1]) if index else begin
            taken = min(count, int(pieces[index]) - start)
            offset = start - piece_start + (0 if index else _before(cache, part))
            ids = cache.stream.read(np.array([start]), taken)[0].tolist()
            yield Passage(_where(cache, part, index), offset, taken, tokenizer.decode(ids))
            start, count = start + taken, count - taken
            if not count:
                return
        part += 1


def _where(cache: OpenSet, part: int, index: int) -> str:
    name = cache.ledger.parts[part]
    record = cache.store.read_json(part_key(name, "json"))
    rows = np.frombuffer(cache.store.read(part_key(name, "row")) or b"", "<u4")
    return next(cache.shards[record["shard"]].rows(record["rows"][0] + int(rows[index]))).where


def _before(cache: OpenSet, part: int) -> int:
    """Tokens in earlier parts of the document with which a part begins."""
    count = 0
    while cache.store.read_json(part_key(cache.ledger.parts[part], "json"))["continues"]:
        part -= 1
        pieces = read_lengths(cache.store, cache.ledger.parts[part])
        count += int(pieces[-1]) if len(pieces) else 0
        if len(pieces) > 1:
            break
    return count
