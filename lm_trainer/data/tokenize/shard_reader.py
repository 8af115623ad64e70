"""Reading of a shard: its rows in batches that are ready to be encoded, and the threads that do this beside encoding.

A shard passes through three threads: one reads a few batches ahead, and encodes some where it is too far ahead
(`work_ahead`), the thread of the caller encodes the others, and one writes parts behind both (`BackgroundStage`).
Reading, encoding and writing release the interpreter lock for most of their time, so the threads do run at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from lm_trainer.core.errors import UserError
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.formats import FormatConfig, TextFormat, UnusableRow
from lm_trainer.data.sources import BadRow, Row, Shard
from lm_trainer.data.tokenizer import Tokenizer

BATCH_ROWS = 4096
"""Most rows that are encoded together; fewer where their text is as long as suits the tokenizer. Changes no result."""

AHEAD = 2
"""Batches that are read before their turn; the thread that reads encodes one beyond them. Changes no result."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class ShardJob:
    """The work of one shard. Picklable."""

    store: KvStore
    index: int
    shard: Shard
    tokenizer: Tokenizer
    part_bytes: tuple[int, int]
    raise_on_bad_row: bool
    format: FormatConfig = field(default_factory=TextFormat)

    def refuse(self, row: BadRow) -> str:
        """Returns the line that the record keeps of a bad row.

        Raises:
            UserError: where the job does not skip them.
        """
        message = f"{row.where}: {row.reason}"
        if self.raise_on_bad_row:
            raise UserError(f"{message}. Repair it, or set data.on_bad_row: skip to leave such rows out")
        return message


@dataclass
class RowBatch:
    """Some rows of one part."""

    row_end: int
    """One more than the number of the last row that was read, even if that one is not in the batch."""
    ends_part: bool = False
    rows: list[Row] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    """The input of the format's `encode`, one value for each row."""
    text_bytes: int = 0
    kept_bytes: int = 0
    """Those of the text, and of what is kept beside its tokens."""
    empty: int = 0
    replaced: int = 0
    bad: list[str] = field(default_factory=list)


def read_batches(job: ShardJob, *, part: int, row: int, is_open: bool) -> Generator[RowBatch, None, None]:
    """Yields the rows from number `row` on, which begin the part of number `part`; the last batch ends the last part.

    Args:
        job: the shard to read.
        part: counted in the shard.
        row: counted in the shard.
        is_open: True if the row continues a document.

    Raises:
        UserError: for a bad row where the job does not skip them, an unreadable file, or one that changes meanwhile.
    """
    files = _FileCheck(job)
    first, largest = job.part_bytes
    # Parts double in size; the shift is bounded, since it would else make an integer of a bit for each part.
    limit, kept_bytes = min(first << min(part, 40), largest), 0
    batch, part_start = RowBatch(row), row
    for found in job.shard.rows(row):
        batch.row_end = found.number + 1
        before = batch.kept_bytes
        if _add_row(job, batch, found, is_open):
            is_open = not found.ends_document
        kept_bytes += batch.kept_bytes - before
        # A part ends by its rows alone, never by the size of a batch, which another tokenizer backend may change.
        batch.ends_part = kept_bytes >= limit
        if batch.ends_part or batch.kept_bytes >= job.tokenizer.batch_bytes or len(batch.rows) >= BATCH_ROWS:
            if batch.ends_part:
                files.check(part, found.where)
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
    """The files of a shard, looked at again before the rows read from them are kept.

    A file that changes while it is read would otherwise end up in a cache whose manifest names the old file.
    """

    def __init__(self, job: ShardJob):
        self._job, self._left = job, list(getattr(job.shard, "files", ()))

    def check(self, part: int, where: str | None) -> None:
        """Looks at the files up to that of the row at `where`; at all, if None.

        Raises:
            UserError: if one is not as the manifest says.
        """
        last = len(self._left) if where is None else self._find(where)
        for file in self._left[: last + 1]:
            if (now := file.now()) != file:
                raise UserError(
                    f"{file.name} changed while it was tokenised: it had {file.size} bytes (version {file.version}), "
                    f"now {now.size} (version {now.version}). {self._way_out(part)}"
                )
        # The last file stays: the next part may hold more of it.
        self._left = self._left[last:]

    def _find(self, where: str) -> int:
        """Returns the index of the row's file among those that are left."""
        for index, file in enumerate(self._left):
            if where == file.name or where.startswith((f"{file.name}:", f"{file.name}[")):
                return index
        return len(self._left)

    def _way_out(self, part: int) -> str:
        if part == 0:
            return "Nothing of it is kept; start again when nothing writes to it any more"
        url = self._job.store.url
        return (
            "What was kept is from before; when nothing writes to it any more, start again with another "
            f"data.cache_dir, or remove {url}"
        )


def _add_row(job: ShardJob, batch: RowBatch, row: Row | BadRow, is_open: bool) -> bool:
    """Adds a row to the batch; returns False if it holds nothing and ends nothing."""
    value, size, beside = "", 0, 0
    if isinstance(row, Row):
        try:
            value, size, replaced, beside = job.format.prepare(row)
        except UnusableRow as error:
            row = BadRow(row.number, row.where, str(error), row.ends_document)
        else:
            batch.replaced += replaced
            batch.empty += not size
    if isinstance(row, BadRow):
        batch.bad.append(job.refuse(row))
        row = Row(row.number, row.where, "", row.ends_document)
    # An empty or bad piece is kept inside an open document, since its end may be the document's.
    if not size and not is_open:
        return False
    batch.rows.append(row)
    batch.values.append(value)
    batch.text_bytes += size
    batch.kept_bytes += size + beside
    return True


def work_ahead(items: Generator[T, None, None], work: Callable[[T], R]) -> Generator[tuple[T, R], None, None]:
    """Yields (item, work on it) in the order of the items, which are made in a thread; errors come in their place.

    The work is done in the thread of the caller. Where that is behind by AHEAD items, the thread that makes them does
    the work on the next one itself, so that both have always something to do, whichever part takes longer.

    Args:
        items: closed at the end.
        work: called in two threads at once.
    """
    end: Any = object()
    made = taken = 0

    def make() -> tuple[T, R | None]:
        nonlocal made
        item = next(items, end)
        done = work(item) if item is not end and made - taken >= AHEAD else None
        made += 1
        return item, done

    pool = ThreadPoolExecutor(1, "read")
    try:
        following = deque(pool.submit(make) for _ in range(AHEAD + 1))
        while (found := following.popleft().result())[0] is not end:
            taken += 1
            following.append(pool.submit(make))
            item, done = found
            yield item, work(item) if done is None else done
    finally:
        # A generator cannot be closed while a thread is inside it.
        pool.shutdown(wait=True, cancel_futures=True)
        items.close()


class BackgroundStage:
    """Pipeline stage in a thread: does one call while its caller makes the next one ready. Its end waits for the last.

    At most one call waits, so that memory stays bounded where a later stage is the slower one.
    """

    def __init__(self, name: str):
        self._pool, self._doing = ThreadPoolExecutor(1, name), Future[Any]()
        self._doing.set_result(None)

    def submit(self, function: Callable[..., Any], *args: Any) -> None:
        """Waits until the call before is done, and starts this one.

        Raises:
            Exception: the one that ended the call before.
        """
        self._doing.result()
        self._doing = self._pool.submit(function, *args)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._doing.result()
