"""Arrow IPC files: those of `datasets`, of Feather and of any other library that writes Arrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO, Any, ClassVar, Literal

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.arrow_rows import arrow_error, batch_rows, check_columns
from lm_trainer.data.sources.base import BadRow, FileShard, FileSource, Row, Shard
from lm_trainer.data.sources.files import File, group, open_seekable

_BATCH_ROWS = 1024
_MAGIC = b"ARROW1"


class ArrowFiles(FileSource):
    """Arrow IPC files and streams, Feather (version 2) included; the document stands in the column `data.text_key`."""

    type: Literal["arrow"] = "arrow"

    suffixes: ClassVar[tuple[str, ...]] = (".arrow", ".feather", ".ipc", ".arrows")

    def shards_of_files(self, files: Sequence[File], text_key: str, fields: tuple[str, ...]) -> list[Shard]:
        return [ArrowShard(run, text_key, fields) for run in group(files)]


class ArrowShard(FileShard):
    """Some files, in order; a row is a row."""

    def form(self) -> dict[str, Any]:
        return {"type": "arrow"}

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        number = 0
        for file in self.files:
            before = number
            with open_seekable(file) as stream:
                for batch in _batches(file, stream, self.wanted):
                    # Rows before the first that is wanted are not decoded.
                    if skipped := min(max(start - number, 0), batch.num_rows):
                        batch, number = batch.slice(skipped), number + skipped
                    yield from batch_rows(self, file, batch, number, before)
                    number += batch.num_rows


def _batches(file: File, stream: IO[bytes], columns: Sequence[str]) -> Iterator[Any]:
    """Yields record batches of few rows, in which only the columns that are read were decoded."""
    import pyarrow

    try:
        schema = _open(stream, None).schema
        check_columns(file, schema, columns)
        # A nested field is read with all of its column.
        roots = {column if column in schema.names else column.partition(".")[0] for column in columns}
        reader = _open(stream, sorted(schema.get_field_index(root) for root in roots))
        indexed = hasattr(reader, "get_batch")
        for batch in (reader.get_batch(i) for i in range(reader.num_record_batches)) if indexed else reader:
            for first in range(0, batch.num_rows, _BATCH_ROWS):
                yield batch.slice(first, _BATCH_ROWS)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{file.url} is truncated or damaged, or no Arrow file: {error}") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise arrow_error(file, error) from None


def _open(stream: IO[bytes], columns: list[int] | None) -> Any:
    """Opens a file or, where it does not begin as one, a stream, for some columns; None: all."""
    import pyarrow.ipc

    # Without threads of Arrow's own: a process that ends while one of them holds `stream` aborts.
    options = pyarrow.ipc.IpcReadOptions(use_threads=False, included_fields=columns)
    stream.seek(0)
    is_file = stream.read(len(_MAGIC)) == _MAGIC
    stream.seek(0)
    open_ = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
    return open_(stream, options=options)
