"""What a step trains on: from a row of a batch back to the documents it was cut from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.core.piecewise import BatchSchedule
from lm_trainer.data.cache.documents import begin_of, need_record, read_lengths, read_rows
from lm_trainer.data.cache.format import Ledger, damaged, part_key
from lm_trainer.data.cache.kvstore import Store
from lm_trainer.data.dataset import Data, OpenSet
from lm_trainer.data.rows.order import Origin
from lm_trainer.data.sources import Shard
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

    Args:
        data: what is trained on.
        schedule: rows of the global batch at each step.
        step: as metrics.jsonl counts, from 1.
        row: which row of its batch, counted from 0; None: all.

    Raises:
        UserError: if the data end before, or there is no such step or row.
    """
    if step < 1:
        raise UserError(f"there is no step {step}: steps are counted from 1, as in metrics.jsonl")
    size, most = schedule.at(step - 1), data.max_steps(schedule)
    if most is not None and step > most:
        raise UserError(f"the data end after {most} steps, by data.stop_strategy; there is no step {step}")
    if row is not None and not 0 <= row < size:
        raise UserError(f"the batch of step {step} has {size} rows, counted from 0; there is no row {row}")
    rows = np.arange(size) if row is None else np.array([row])
    origins = data.order(schedule).origins(schedule.rows_before(step - 1) + rows)
    for number, origin in zip(rows.tolist(), origins, strict=True):
        cache = data.caches[f"{origin.set.name}/train"]
        spans = origin.set.rows.spans(origin.row)
        found = [passage for start, count in spans for passage in passages(cache, data.tokenizer, start, count)]
        yield TracedRow(number, origin, found)


def passages(cache: OpenSet, tokenizer: Tokenizer, start: int, count: int) -> Iterator[Passage]:
    """The documents, or parts of them, that the tokens [start, start + count) of a stream are."""
    ledger = cache.ledger
    ends = np.cumsum(np.asarray(ledger.tokens, np.int64))
    part = int(np.searchsorted(ends, start, side="right"))
    while count:
        begin = int(ends[part]) - ledger.tokens[part]
        pieces = np.cumsum(read_lengths(cache.store, ledger, part)) + begin
        for index in range(int(np.searchsorted(pieces, start, side="right")), len(pieces)):
            piece_start = int(pieces[index - 1]) if index else begin
            taken = min(count, int(pieces[index]) - start)
            offset = start - piece_start + (0 if index else begin_of(cache.store, ledger, part)[1])
            ids = cache.stream.read(np.array([start]), taken)[0].tolist()
            yield Passage(where(cache.store, ledger, cache.shards, part, index), offset, taken, tokenizer.decode(ids))
            start, count = start + taken, count - taken
            if not count:
                return
        part += 1


def where(store: Store, ledger: Ledger, shards: Sequence[Shard], part: int, index: int) -> str:
    """Where a document, or a piece of one, in a part came from: the file and the line or row."""
    row, number = int(read_rows(store, ledger, part)[index]), need_record(store, ledger, part)["shard"]
    # All of a cache that was built elsewhere stands for the shards that it was built from.
    whole = len(shards) == 1 and number > 0
    found = next(iter(shards[0 if whole else number].rows(row)), None)
    if found is None:
        raise damaged(store, part_key(ledger.parts[part], "row"))
    return f"{found.where}, shard {number}" if whole else found.where
