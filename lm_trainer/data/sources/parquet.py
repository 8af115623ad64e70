"""Parquet files, read one row group at a time and only in the required columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, ClassVar, Literal

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.arrow_rows import check_columns, iter_batch_rows, translate_arrow_error
from lm_trainer.data.sources.base import ALL_FIELDS, BadRow, FileShard, FileSource, Row, Shard
from lm_trainer.data.sources.files import File, group_files, open_seekable

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

_BATCH_ROWS, _BATCH_BYTES = 1024, 1 << 20
"""Maximum size of a batch, chosen such that it stays in a core's cache until its rows are used."""


class Parquet(FileSource):
    """Parquet files. The document is in the column `data.text_key`. Needs the package `pyarrow`."""

    type: Literal["parquet"] = "parquet"

    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    def shards_of_files(self, files: Sequence[File], text_key: str, fields: tuple[str, ...]) -> list[Shard]:
        return [ParquetShard(run, text_key, fields) for run in group_files(files)]


class ParquetShard(FileShard):
    """One or more files, in order. Each row is a row of the table."""

    def reader_identity(self) -> dict[str, object]:
        return {"type": "parquet"}

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        file_start = 0
        for file in self.files:
            with open_seekable(file) as stream:
                # Opening reads only the footer, so files before `start` are skipped at little cost.
                table = _open_table(file, stream, self.read_fields)
                count = table.metadata.num_rows
                if file_start + count > start:
                    yield from self._iter_file_rows(file, table, file_start, start)
                file_start += count

    def _iter_file_rows(
        self, file: File, table: pyarrow.parquet.ParquetFile, file_start: int, start: int
    ) -> Iterator[Row | BadRow]:
        """Yields the rows of one file from number `start` on. `file_start` is the number of the file's first row."""
        number, groups = file_start, []
        for index in range(table.num_row_groups):
            rows = table.metadata.row_group(index).num_rows
            if not groups and number + rows <= start:
                number += rows
            else:
                groups.append(index)
        for batch in _iter_batches(file, table, groups, self.read_fields):
            if skipped := min(max(start - number, 0), batch.num_rows):
                batch, number = batch.slice(skipped), number + skipped
            yield from iter_batch_rows(self, file, batch, number, file_start)
            number += batch.num_rows


def _open_table(file: File, stream: IO[bytes], columns: tuple[str, ...]) -> pyarrow.parquet.ParquetFile:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"cannot read {file.url}: Parquet needs a package; run: pip install pyarrow") from None
    try:
        # Arrow's read-ahead is off, because a process that exits while such a thread holds `stream` aborts.
        table = pyarrow.parquet.ParquetFile(stream, pre_buffer=False)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{file.url} is truncated or damaged, or no Parquet file: {error}") from None
    if columns != ALL_FIELDS:
        check_columns(file, table.schema_arrow, columns)
    return table


def _iter_batches(
    file: File, table: pyarrow.parquet.ParquetFile, groups: list[int], fields: tuple[str, ...]
) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow

    columns = None if fields == ALL_FIELDS else list(fields)
    try:
        yield from table.iter_batches(
            _num_batch_rows(table, groups), row_groups=groups, columns=columns, use_threads=False
        )
    except (pyarrow.ArrowException, OSError) as error:
        raise translate_arrow_error(file, error) from None


def _num_batch_rows(table: pyarrow.parquet.ParquetFile, groups: list[int]) -> int:
    """Returns the number of rows to read at once, which is smaller for large rows such as recordings."""
    metadata = [table.metadata.row_group(index) for index in groups]
    rows, size = (
        sum(row_group.num_rows for row_group in metadata),
        sum(row_group.total_byte_size for row_group in metadata),
    )
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES * rows // max(size, 1)))
