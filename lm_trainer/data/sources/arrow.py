"""Arrow IPC files, as written by `datasets`, Feather and other Arrow libraries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, ClassVar, Literal

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.arrow_rows import check_columns, iter_batch_rows, translate_arrow_error
from lm_trainer.data.sources.base import ALL_FIELDS, BadRow, FileShard, FileSource, Row, Shard
from lm_trainer.data.sources.files import File, group_files, open_seekable

if TYPE_CHECKING:
    import pyarrow

_BATCH_ROWS = 1024
_MAGIC = b"ARROW1"


class ArrowFiles(FileSource):
    """Arrow IPC files and streams, including Feather version 2. The document is in the column `data.text_key`."""

    type: Literal["arrow"] = "arrow"

    suffixes: ClassVar[tuple[str, ...]] = (".arrow", ".feather", ".ipc", ".arrows")

    def shards_of_files(self, files: Sequence[File], text_key: str, fields: tuple[str, ...]) -> list[Shard]:
        return [ArrowShard(run, text_key, fields) for run in group_files(files)]


class ArrowShard(FileShard):
    """One or more files, in order. Each row is a row of the table."""

    def reader_identity(self) -> dict[str, object]:
        return {"type": "arrow"}

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        number = 0
        for file in self.files:
            file_start = number
            with open_seekable(file) as stream:
                for batch in _iter_batches(file, stream, self.read_fields):
                    # Skip earlier rows without decoding them.
                    if skipped := min(max(start - number, 0), batch.num_rows):
                        batch, number = batch.slice(skipped), number + skipped
                    yield from iter_batch_rows(self, file, batch, number, file_start)
                    number += batch.num_rows


def _iter_batches(file: File, stream: IO[bytes], columns: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
    """Yields small record batches, and decodes only the requested columns."""
    import pyarrow

    try:
        schema = _open_arrow(stream, None).schema
        columns = schema.names if columns == ALL_FIELDS else columns
        check_columns(file, schema, columns)
        # To read a nested field, its full column is read.
        roots = {column if column in schema.names else column.partition(".")[0] for column in columns}
        reader = _open_arrow(stream, sorted(schema.get_field_index(root) for root in roots))
        indexed = hasattr(reader, "get_batch")
        for batch in (reader.get_batch(i) for i in range(reader.num_record_batches)) if indexed else reader:
            for first in range(0, batch.num_rows, _BATCH_ROWS):
                yield batch.slice(first, _BATCH_ROWS)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{file.url} is truncated or damaged, or no Arrow file: {error}") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise translate_arrow_error(file, error) from None


def _open_arrow(
    stream: IO[bytes], columns: list[int] | None
) -> pyarrow.RecordBatchFileReader | pyarrow.RecordBatchStreamReader:
    """Opens the given columns (None means all) of an Arrow file, or of an Arrow stream if the file magic is missing."""
    import pyarrow.ipc

    # Arrow's threads are off, because a process that exits while an Arrow thread holds `stream` aborts.
    options = pyarrow.ipc.IpcReadOptions(use_threads=False, included_fields=columns)
    stream.seek(0)
    is_file = stream.read(len(_MAGIC)) == _MAGIC
    stream.seek(0)
    open_ = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
    return open_(stream, options=options)
