"""Parquet files, read row group by row group and only in the columns that are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.arrow_rows import arrow_error, batch_rows, check_columns
from lm_trainer.data.sources.base import BadRow, FileShard, FileSource, Row, Shard
from lm_trainer.data.sources.files import File, group, open_seekable

_BATCH_ROWS, _BATCH_BYTES = 1024, 1 << 20
"""At most of a batch, which then stays in a core's cache until its rows are used."""


class Parquet(FileSource):
    """Parquet files; the document stands in the column `data.text_key`. Needs the package `pyarrow`."""

    type: Literal["parquet"] = "parquet"

    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    def shards_of_files(self, files: Sequence[File], text_key: str, fields: tuple[str, ...]) -> list[Shard]:
        return [ParquetShard(run, text_key, fields) for run in group(files)]


class ParquetShard(FileShard):
    """Some files, in order; a row is a row."""

    def form(self) -> dict[str, Any]:
        return {"type": "parquet"}

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        before = 0
        for file in self.files:
            with open_seekable(file) as stream:
                # This reads the footer alone, so a file that lies before `start` is counted at little cost.
                table = _open(file, stream, self.wanted)
                count = table.metadata.num_rows
                if before + count > start:
                    yield from self._rows_of(file, table, before, start)
                before += count

    def _rows_of(self, file: File, table: Any, before: int, start: int) -> Iterator[Row | BadRow]:
        """Yields the rows of one file from number `start` on; `before` is the number of its first."""
        number, groups = before, []
        for index in range(table.num_row_groups):
            rows = table.metadata.row_group(index).num_rows
            if not groups and number + rows <= start:
                number += rows
            else:
                groups.append(index)
        for batch in _batches(file, table, groups, list(self.wanted)):
            if skipped := min(max(start - number, 0), batch.num_rows):
                batch, number = batch.slice(skipped), number + skipped
            yield from batch_rows(self, file, batch, number, before)
            number += batch.num_rows


def _open(file: File, stream: Any, columns: tuple[str, ...]) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"cannot read {file.url}: Parquet needs a package; run: pip install pyarrow") from None
    try:
        # Arrow would read ahead in threads of its own; a process that ends while one of them holds `stream` aborts.
        table = pyarrow.parquet.ParquetFile(stream, pre_buffer=False)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{file.url} is truncated or damaged, or no Parquet file: {error}") from None
    check_columns(file, table.schema_arrow, columns)
    return table


def _batches(file: File, table: Any, groups: list[int], columns: list[str]) -> Iterator[Any]:
    import pyarrow

    try:
        yield from table.iter_batches(_batch_rows(table, groups), row_groups=groups, columns=columns, use_threads=False)
    except (pyarrow.ArrowException, OSError) as error:
        raise arrow_error(file, error) from None


def _batch_rows(table: Any, groups: list[int]) -> int:
    """Rows to read at once: fewer where they are large, such as recordings."""
    found = [table.metadata.row_group(index) for index in groups]
    rows, size = sum(each.num_rows for each in found), sum(each.total_byte_size for each in found)
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES * rows // max(size, 1)))
