"""Reads a shard, and groups its rows into batches for the tokenizer, in threads that run in parallel with encoding.

A shard passes through three threads. The first reads a few batches ahead, and encodes some of them itself when it is
too far ahead (`map_with_prefetch`). The caller's thread encodes the other batches. The third writes parts
(`BackgroundStage`). Reading, encoding and writing release the interpreter lock most of the time, so the threads do
run in parallel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, TypeVarTuple

from lm_trainer.core.errors import UserError
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.formats import FormatConfig, TextFormat, UnusableRow
from lm_trainer.data.sources import BadRow, Row, Shard
from lm_trainer.data.tokenizer import Tokenizer

BATCH_ROWS = 4096
"""Maximum number of rows encoded together; a batch ends earlier at the tokenizer's `batch_bytes`. The result does not
depend on it."""

AHEAD = 2
"""Number of batches read ahead; the reading thread encodes one batch beyond these. Does not affect the result."""

T = TypeVar("T")
R = TypeVar("R")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True)
class ShardJob:
    """A job to build one shard. Picklable."""

    store: KvStore
    index: int
    shard: Shard
    tokenizer: Tokenizer
    part_bytes: tuple[int, int]
    raise_on_bad_row: bool
    format: FormatConfig = field(default_factory=TextFormat)

    def bad_row_line(self, row: BadRow) -> str:
        """Returns the line to record for a bad row.

        Raises:
            UserError: if the job does not skip bad rows.
        """
        message = f"{row.where}: {row.reason}"
        if self.raise_on_bad_row:
            raise UserError(f"{message}. Repair it, or set data.on_bad_row: skip to leave such rows out")
        return message


@dataclass
class RowBatch:
    """Consecutive rows of one part."""

    row_end: int
    """Exclusive end of the rows read, even if the last of them is not in the batch."""
    ends_part: bool = False
    rows: list[Row] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    """Inputs for the format's `encode`, one value per row."""
    text_bytes: int = 0
    kept_bytes: int = 0
    """Number of bytes of the text and of the data stored with its tokens."""
    empty: int = 0
    replaced: int = 0
    bad: list[str] = field(default_factory=list)


def read_batches(job: ShardJob, *, part: int, row: int, is_open: bool) -> Generator[RowBatch, None, None]:
    """Yields batches of a shard's rows, starting with `row`, the first row of part `part`.

    The last batch ends the last part.

    Args:
        job: the shard to read.
        part: index of the part within the shard.
        row: number of the row within the shard.
        is_open: True if the row continues a document.

    Raises:
        UserError: if a row is bad and the job does not skip bad rows, or if a file is unreadable or changes meanwhile.
    """
    files = _FileCheck(job)
    first, largest = job.part_bytes
    # Each part is twice as large as the previous one. The shift is bounded, since otherwise the integer would grow by
    # one bit per part.
    limit, kept_bytes = min(first << min(part, 40), largest), 0
    batch, part_start = RowBatch(row), row
    for next_row in job.shard.rows(row):
        batch.row_end = next_row.number + 1
        previous_bytes = batch.kept_bytes
        if _add_row(job, batch, next_row, is_open):
            is_open = not next_row.ends_document
        kept_bytes += batch.kept_bytes - previous_bytes
        # The end of a part depends only on its rows, never on the batch size, which varies with the tokenizer backend.
        batch.ends_part = kept_bytes >= limit
        if batch.ends_part or batch.kept_bytes >= job.tokenizer.batch_bytes or len(batch.rows) >= BATCH_ROWS:
            if batch.ends_part:
                files.check(part, next_row.where)
            yield batch
            if batch.ends_part:
                part, kept_bytes, part_start = part + 1, 0, batch.row_end
                limit = min(first << min(part, 40), largest)
            batch = RowBatch(batch.row_end)
    files.check(part, None)
    if batch.row_end > part_start:
        batch.ends_part = True
        yield batch


class _FileCheck:
    """Checks that the files of a shard are unchanged before the rows read from the files are committed.

    Otherwise, the cache could contain a changed file while its manifest names the old version.
    """

    def __init__(self, job: ShardJob):
        self._job, self._left = job, list(getattr(job.shard, "files", ()))

    def check(self, part: int, row_location: str | None) -> None:
        """Checks the remaining files up to and including the one with the row at `row_location`; None checks all.

        Raises:
            UserError: if a file differs from the manifest.
        """
        last = len(self._left) if row_location is None else self._find_file_index(row_location)
        for file in self._left[: last + 1]:
            if (current := file.refresh()) != file:
                raise UserError(
                    f"{file.name} changed while it was tokenised: it had {file.size} bytes (version {file.version}), "
                    f"now {current.size} (version {current.version}). {self._repair_advice(part)}"
                )
        # Keep the last file, because the next part may hold more of its rows.
        self._left = self._left[last:]

    def _find_file_index(self, row_location: str) -> int:
        """Returns the index of the row's file among the remaining files."""
        for index, file in enumerate(self._left):
            if row_location == file.name or row_location.startswith((f"{file.name}:", f"{file.name}[")):
                return index
        return len(self._left)

    def _repair_advice(self, part: int) -> str:
        if part == 0:
            return "Nothing of it is kept; start again when nothing writes to it any more"
        url = self._job.store.url
        return (
            "What was kept is from before; when nothing writes to it any more, start again with another "
            f"data.cache_dir, or remove {url}"
        )


def _add_row(job: ShardJob, batch: RowBatch, row: Row | BadRow, is_open: bool) -> bool:
    """Adds a row to the batch. Returns False if the row is empty and does not end a document."""
    value, size, extra_bytes = "", 0, 0
    if isinstance(row, Row):
        try:
            value, size, replaced, extra_bytes = job.format.prepare(row)
        except UnusableRow as error:
            row = BadRow(row.number, row.where, str(error), row.ends_document)
        else:
            batch.replaced += replaced
            batch.empty += not size
    if isinstance(row, BadRow):
        batch.bad.append(job.bad_row_line(row))
        row = Row(row.number, row.where, "", row.ends_document)
    # An empty or bad piece of an open document is kept, since it may end the document.
    if not size and not is_open:
        return False
    batch.rows.append(row)
    batch.values.append(value)
    batch.text_bytes += size
    batch.kept_bytes += size + extra_bytes
    return True


def map_with_prefetch(items: Generator[T, None, None], work: Callable[[T], R]) -> Generator[tuple[T, R], None, None]:
    """Yields (item, work(item)) in order. A second thread produces the items. Errors are also raised in order.

    The work is done in the caller's thread. When it is AHEAD items behind, the producing thread does the work on the
    next item itself, so both threads stay busy even if one side is slower.

    Args:
        items: source of the items, which is closed at the end.
        work: function that is called from two threads at once.
    """
    end: Any = object()
    num_made = num_taken = 0

    def next_result() -> tuple[T, R | None]:
        nonlocal num_made
        item = next(items, end)
        done = work(item) if item is not end and num_made - num_taken >= AHEAD else None
        num_made += 1
        return item, done

    pool = ThreadPoolExecutor(1, "read")
    try:
        following = deque(pool.submit(next_result) for _ in range(AHEAD + 1))
        while (entry := following.popleft().result())[0] is not end:
            num_taken += 1
            following.append(pool.submit(next_result))
            item, done = entry
            yield item, work(item) if done is None else done
    finally:
        # A generator cannot be closed while a thread is inside it.
        pool.shutdown(wait=True, cancel_futures=True)
        items.close()


class BackgroundStage:
    """A pipeline stage in a thread, which runs one call while the caller prepares the next.

    On exit, waits for the last.

    At most one call is pending, so memory stays bounded even if this stage is slower than the caller.
    """

    def __init__(self, name: str):
        self._pool, self._doing = ThreadPoolExecutor(1, name), Future[None]()
        self._doing.set_result(None)

    def submit(self, function: Callable[[*Arguments], None], *args: *Arguments) -> None:
        """Waits until the previous call is done, and starts this call.

        Raises:
            Exception: the error that ended the previous call.
        """
        self._doing.result()
        self._doing = self._pool.submit(function, *args)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._doing.result()
