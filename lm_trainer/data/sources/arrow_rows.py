"""Rows of Arrow tables, for all sources whose files become one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.data.sources.base import BadRow, FileShard, Row, bad, read_record
from lm_trainer.data.sources.files import File, damaged


def batch_rows(shard: FileShard, file: File, batch: Any, number: int, before: int) -> Iterator[Row | BadRow]:
    """Yields the rows of a record batch.

    Args:
        shard: whose rows they are.
        file: of the shard.
        batch: of the file.
        number: of the first of its rows in the shard.
        before: rows of the shard before those of the file.
    """
    name = file.name
    for at, record in enumerate(_records(batch) if shard.fields else _texts(batch), number):
        where = f"{name}:{at - before + 1}"
        if isinstance(record, str):
            yield Row(at, where, record)
        else:
            row = record if isinstance(record, BadRow) else read_record(record, shard.text_key, shard.fields)
            yield row._replace(number=at, where=where)


def arrow_error(file: File, error: Exception) -> Exception:
    """Returns the error for what Arrow says of a file: not all that it cannot read is damaged."""
    import pyarrow

    if isinstance(error, MemoryError):
        return MachineError(f"there is too little memory to read {file.url}: {error}; lower data.num_workers")
    if isinstance(error, pyarrow.ArrowNotImplementedError | pyarrow.ArrowCapacityError):
        return UserError(
            f"{file.url} is written in a way that pyarrow does not read: {error}; write it again, with another "
            "compression or in smaller row groups"
        )
    # Errors of a disk or a server have a number or a type of their own; those of Arrow's decoders have neither.
    if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
        return error
    return damaged(file, error)


def check_columns(file: File, schema: Any, columns: Sequence[str]) -> None:
    """Refuses a table without some of the columns, or the fields `a.b.c` inside of them, that are to be read.

    Raises:
        UserError: naming those that there are.
    """
    for column in columns:
        if not _has(schema, column):
            raise UserError(
                f"{file.url} has no column {column!r} (columns: {', '.join(schema.names)}); "
                "data.text_key, data.text_template or data.format names the column to read"
            )


def _has(schema: Any, column: str) -> bool:
    if column in schema.names:
        return True
    root, *rest = column.split(".")
    if root not in schema.names:
        return False
    kind = schema.field(root).type
    for name in rest:
        index = kind.get_field_index(name) if hasattr(kind, "get_field_index") else -1
        if index < 0:
            return False
        kind = kind.field(index).type
    return True


def _texts(batch: Any) -> list[Any]:
    """Returns the text of each row of a single column; of a row without text, its record, as `_records` does."""
    # A list of values costs much less than a list of mappings of one value each.
    try:
        values = batch.column(0).to_pylist() if batch.num_columns == 1 else None
    except UnicodeDecodeError:
        values = None
    if values is None:
        return _records(batch)
    name = batch.schema.names[0]
    return [value if isinstance(value, str) else {name: value} for value in values]


def _records(batch: Any) -> list[Any]:
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        # Arrow does not say which row is not UTF-8, so each is tried by itself.
        return [_record(batch.slice(index, 1)) for index in range(batch.num_rows)]


def _record(row: Any) -> Any:
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError as error:
        return bad(f"invalid UTF-8 at byte {error.start} of the text")
