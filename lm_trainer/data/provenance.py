"""The provenance of a batch: maps rows back to their source documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.core.piecewise import BatchSchedule
from lm_trainer.data.cache.documents import find_first_piece, read_lengths, read_required_record, read_rows
from lm_trainer.data.cache.format import damage_error, part_key
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.cache.token_location import TokenLocation
from lm_trainer.data.dataset import Data
from lm_trainer.data.rows.order import RowOrigin
from lm_trainer.data.sources import Shard
from lm_trainer.data.tokenize.open_cache import OpenCache
from lm_trainer.data.tokenizer import Tokenizer


class Passage(NamedTuple):
    """The part of a document that is in a row."""

    where: str
    """Origin of the document: its file, and its line or row."""
    offset: int
    """Number of tokens of the document before the passage."""
    tokens: int
    text: str
    document: int
    """Number of the document in its cache, counted from 0, including excluded documents."""


class RowDocuments(NamedTuple):
    """One row of a global batch, with the documents in it."""

    row: int
    """Number of the row in the batch."""
    origin: RowOrigin
    passages: list[Passage]


def documents_of_step(data: Data, schedule: BatchSchedule, step: int, row: int | None = None) -> Iterator[RowDocuments]:
    """Yields the rows of one step with their documents.

    Args:
        data: the data of the run.
        schedule: number of rows of the global batch at each step.
        step: number of the step, counted from 1 as in metrics.jsonl.
        row: number of a single row of the batch, counted from 0; None yields all rows.

    Raises:
        UserError: if the data end earlier, or the step or row does not exist.
    """
    if step < 1:
        raise UserError(f"there is no step {step}: steps are counted from 1, as in metrics.jsonl")
    # The schedule and the order count steps from 0.
    size, max_steps = schedule.at(step - 1), data.max_steps(schedule)
    if max_steps is not None and step > max_steps:
        raise UserError(f"the data end after {max_steps} steps, by data.stop_strategy; there is no step {step}")
    if row is not None and not 0 <= row < size:
        raise UserError(f"the batch of step {step} has {size} rows, counted from 0; there is no row {row}")
    rows = np.arange(size) if row is None else np.array([row])
    origins = data.train_order(schedule).row_origins(schedule.rows_before(step - 1) + rows)
    for number, origin in zip(rows.tolist(), origins, strict=True):
        cache = data.caches[f"{origin.set.name}/train"]
        spans = origin.set.rows.token_runs(origin.row)
        row_passages = [
            passage for start, count in spans for passage in iter_passages(cache, data.tokenizer, start, count)
        ]
        yield RowDocuments(number, origin, row_passages)


def iter_passages(cache: OpenCache, tokenizer: Tokenizer, start: int, count: int) -> Iterator[Passage]:
    """Yields the documents or parts of documents in the tokens [start, start + count) of `cache.stream`."""
    for first, tokens in cache.to_unfiltered(start, count):
        yield from iter_full_stream_passages(cache, tokenizer, first, tokens)


def iter_full_stream_passages(cache: OpenCache, tokenizer: Tokenizer, start: int, count: int) -> Iterator[Passage]:
    """Yields the documents or parts of documents in the tokens [start, start + count) of `cache.whole`."""
    ledger = cache.ledger
    ends = np.cumsum(np.asarray(ledger.tokens, np.int64))
    part = int(np.searchsorted(ends, start, side="right"))
    while count:
        begin = int(ends[part]) - ledger.tokens[part]
        # The ends of the pieces in the stream. An empty piece is skipped, since it has the same end as the piece before
        # it.
        pieces = np.cumsum(read_lengths(cache.store, ledger, part)) + begin
        for index in range(int(np.searchsorted(pieces, start, side="right")), len(pieces)):
            piece_start = int(pieces[index - 1]) if index else begin
            length = min(count, int(pieces[index]) - start)
            # Only the first piece of a part can continue a document of an earlier part.
            offset = start - piece_start + (0 if index else find_first_piece(cache.store, ledger, part)[1])
            ids = cache.whole.read(np.array([start]), length)[0].tolist()
            source = find_source(cache.store, ledger, cache.shards, part, index)
            # `documents` counts the documents that end in a part, so the first piece of the next part continues the
            # numbering whether or not it continues a document.
            number = sum(ledger.documents[:part]) + index
            yield Passage(source, offset, length, tokenizer.decode(ids), number)
            start, count = start + length, count - length
            if not count:
                return
        part += 1


def find_source(store: KvStore, ledger: Ledger, shards: Sequence[Shard], part: int, index: int) -> str:
    """Returns the file and the line or row of a document or a piece in a part."""
    record = read_required_record(store, ledger, part)
    row, number = int(read_rows(store, ledger, part)[index]), record["shard"]
    if ledger.places:
        location = TokenLocation(*ledger.places[part])
        return f"{location.path}:token {location.first + row - record['rows'][0]}"
    # A prebuilt cache is a single shard, which represents all of its original shards.
    prebuilt = len(shards) == 1 and number > 0
    source_row = next(iter(shards[0 if prebuilt else number].rows(row)), None)
    if source_row is None:
        raise damage_error(store, part_key(ledger.parts[part], "row"))
    return f"{source_row.where}, shard {number}" if prebuilt else source_row.where
