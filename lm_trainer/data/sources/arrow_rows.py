"""Converts Arrow tables to rows, for all sources that read Arrow data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.data.sources.base import BadRow, FileShard, Row, make_bad_row, read_record
from lm_trainer.data.sources.files import File, damage_error

if TYPE_CHECKING:
    import pyarrow


def iter_batch_rows(
    shard: FileShard, file: File, batch: pyarrow.RecordBatch, number: int, file_start: int
) -> Iterator[Row | BadRow]:
    """Yields the rows of a record batch.

    Args:
        shard: the shard with the rows.
        file: the file with the batch.
        batch: the record batch.
        number: number of the first row of the batch in the shard.
        file_start: number of the first row of the file in the shard.
    """
    name = file.name
    for index, record in enumerate(_to_records(batch) if shard.fields else _texts_or_records(batch), number):
        location = f"{name}:{index - file_start + 1}"
        if isinstance(record, str):
            yield Row(index, location, record)
        else:
            row = record if isinstance(record, BadRow) else read_record(record, shard.text_key, shard.fields)
            yield row._replace(number=index, where=location)


def translate_arrow_error(file: File, error: Exception) -> Exception:
    """Converts an Arrow error to the error to raise, since an unreadable file is not always damaged."""
    import pyarrow

    if isinstance(error, MemoryError):
        return MachineError(f"there is too little memory to read {file.url}: {error}; lower data.num_workers")
    if isinstance(error, pyarrow.ArrowNotImplementedError | pyarrow.ArrowCapacityError):
        return UserError(
            f"{file.url} is written in a way that pyarrow does not read: {error}; write it again, with another "
            "compression or in smaller row groups"
        )
    # Disk and server errors have an errno or a specific type. Errors of Arrow's decoders have neither.
    if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
        return error
    return damage_error(file, error)


def check_columns(file: File, schema: pyarrow.Schema, columns: Sequence[str]) -> None:
    """Checks that a table has the columns to be read, which may be nested fields such as `a.b.c`.

    Raises:
        UserError: if a column is missing; lists the existing ones.
    """
    for column in columns:
        if not _has_column(schema, column):
            raise UserError(
                f"{file.url} has no column {column!r} (columns: {', '.join(schema.names)}); "
                "data.text_key, data.text_template or data.format names the column to read"
            )


def _has_column(schema: pyarrow.Schema, column: str) -> bool:
    if column in schema.names:
        return True
    root, *nested_names = column.split(".")
    if root not in schema.names:
        return False
    kind = schema.field(root).type
    for name in nested_names:
        index = kind.get_field_index(name) if hasattr(kind, "get_field_index") else -1
        if index < 0:
            return False
        kind = kind.field(index).type
    return True


def _texts_or_records(batch: pyarrow.RecordBatch) -> list[object]:
    """Returns the text of every row of a single-column batch.

    A row without text becomes a record as in `_to_records`.
    """
    # A list of values is much cheaper than a list of single-item mappings.
    try:
        values = batch.column(0).to_pylist() if batch.num_columns == 1 else None
    except UnicodeDecodeError:
        values = None
    if values is None:
        return _to_records(batch)
    name = batch.schema.names[0]
    return [value if isinstance(value, str) else {name: value} for value in values]


def _to_records(batch: pyarrow.RecordBatch) -> list[object]:
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        # Arrow does not report which row is invalid UTF-8, so rows are converted one by one.
        return [_to_record(batch.slice(index, 1)) for index in range(batch.num_rows)]


def _to_record(row: pyarrow.RecordBatch) -> object:
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError as error:
        return make_bad_row(f"invalid UTF-8 at byte {error.start} of the text")
