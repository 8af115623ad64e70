"""Reads one shard of a source and writes its parts. Deterministic and idempotent: anyone may run it twice."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.data.formats import Document, FormatConfig, TextFormat, Unusable
from lm_trainer.data.layout import part_key, part_name, shard_key, token_dtype
from lm_trainer.data.marks import pack_marks
from lm_trainer.data.sources import BadRow, Row, Shard
from lm_trainer.data.store import Store, canonical_json
from lm_trainer.data.tokenizer import Tokenizer

BATCH_ROWS, BATCH_BYTES = 256, 1 << 20
"""Rows are encoded together until either is reached; does not change the result."""


class Stopped(Exception):
    """The build was asked to stop; what is committed stays."""


@dataclass(frozen=True)
class Job:
    """One shard's work. Picklable."""

    store: Store
    index: int
    shard: Shard
    tokenizer: Tokenizer
    part_bytes: tuple[int, int]
    raise_on_bad_row: bool
    format: FormatConfig = field(default_factory=TextFormat)


@dataclass
class Part:
    """What has been read since the last commit."""

    row_start: int
    continues: bool
    """Whether the first tokens belong to a document that began in an earlier part."""
    ids: list[np.ndarray] = field(default_factory=list)
    learn: list[np.ndarray] = field(default_factory=list)
    """bool per token, where the format marks what to learn."""
    lengths: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    documents: int = 0
    text_bytes: int = 0
    empty: int = 0
    replaced: int = 0
    bad: list[str] = field(default_factory=list)


def build_shard(
    job: Job, *, on_rows: Callable[[int], None] | None = None, stopped: Callable[[], bool] = lambda: False
) -> None:
    """Writes every part of the shard that is not there yet, and marks the shard as done.

    Args:
        job: what to do.
        on_rows: called with the text bytes of each batch of rows as it is encoded.
        stopped: asked before each batch.

    Raises:
        UserError: for a bad row where the job does not skip them, or an unreadable file.
        MachineError: if the store cannot be written.
        Stopped: if `stopped` said so.
    """
    if job.store.read(shard_key(job.index)) is None:
        _ShardBuild(job, on_rows, stopped).run()


class _ShardBuild:
    def __init__(self, job: Job, on_rows: Callable[[int], None] | None, stopped: Callable[[], bool]):
        self.job, self.on_rows, self.stopped = job, on_rows, stopped
        self.eos, self.bos, self.dtype = (
            job.tokenizer.eos_id,
            job.tokenizer.bos_id if job.format.adds_bos else None,
            token_dtype(job.tokenizer.vocab_size),
        )
        self.index, row, self.open = self._resume()
        self.part = Part(row, continues=self.open)
        self.pending: list[tuple[Row, Any]] = []
        self.pending_bytes = 0

    def _resume(self) -> tuple[int, int, bool]:
        """The first part that is not committed, its first row, and whether a document is open there."""
        index, row, is_open = 0, 0, False
        while (record := self.job.store.read_json(part_key(part_name(self.job.index, index), "json"))) is not None:
            index, row, is_open = index + 1, record["rows"][1], record["open"]
        return index, row, is_open

    def run(self) -> None:
        row_end = self.part.row_start
        for row in self.job.shard.rows(row_end):
            row_end = row.number + 1
            self._take(row)
            if self.pending_bytes >= BATCH_BYTES or len(self.pending) >= BATCH_ROWS:
                self._encode()
            if self.part.text_bytes >= self._limit():
                self._commit(row_end)
        if row_end > self.part.row_start:
            self._commit(row_end)
        self.job.store.write_json(shard_key(self.job.index), {"parts": self.index})

    def _limit(self) -> int:
        first, largest = self.job.part_bytes
        return min(first << min(self.index, 40), largest)

    def _take(self, row: Row | BadRow) -> None:
        value, size = "", 0
        if isinstance(row, Row):
            try:
                value, size, replaced = self.job.format.prepare(row)
            except Unusable as error:
                row = BadRow(row.number, row.where, str(error), row.ends_document)
            else:
                self.part.replaced += replaced
                self.part.empty += not size
        if isinstance(row, BadRow):
            self._refuse(row)
            row = Row(row.number, row.where, "", row.ends_document)
        if not size and not self._document_open():
            return
        self.pending.append((row, value))
        self.pending_bytes += size
        self.part.text_bytes += size

    def _refuse(self, row: BadRow) -> None:
        """Counts a bad row.

        Raises:
            UserError: where the job does not skip them.
        """
        message = f"{row.where}: {row.reason}"
        if self.job.raise_on_bad_row:
            raise UserError(f"{message}. Repair it, or set data.on_bad_row: skip to leave such rows out")
        self.part.bad.append(message)

    def _document_open(self) -> bool:
        return not self.pending[-1][0].ends_document if self.pending else self.open

    def _encode(self) -> None:
        if self.stopped():
            raise Stopped
        batch, size = self.pending, self.pending_bytes
        self.pending, self.pending_bytes = [], 0
        documents = self.job.format.encode([value for _, value in batch], self.job.tokenizer)
        for (row, _), document in zip(batch, documents, strict=True):
            if isinstance(document, Unusable):
                self._refuse(BadRow(row.number, row.where, str(document)))
            elif self.job.format.marks:
                self._append_marked(row, document)
            else:
                self._append(row, np.asarray(document.ids, self.dtype))
        if self.on_rows and batch:
            self.on_rows(size)

    def _append(self, row: Row, ids: np.ndarray) -> None:
        """Takes in a text or a piece of one, or ids, in which EOS ends documents."""
        ends = np.flatnonzero(ids == self.eos)
        if len(ends):
            if row.record is None:
                raise UserError(
                    f"{row.where}: the tokenizer makes its end-of-document token (id {self.eos}) out of text; "
                    "it cannot be used for training"
                )
            for piece in np.split(ids, ends + 1)[:-1]:
                self._append(row, piece[:-1])
            ids = ids[ends[-1] + 1 :]
            if not len(ids):
                return
        before = [self.bos] if self.bos is not None and not self.open else []
        after = [self.eos] if row.ends_document else []
        tokens = np.concatenate([np.asarray(before, self.dtype), ids, np.asarray(after, self.dtype)])
        part = self.part
        if self.open and part.lengths:
            part.lengths[-1] += len(tokens)
        else:
            part.lengths.append(len(tokens))
            part.rows.append(row.number - part.row_start)
        part.ids.append(tokens)
        part.documents += row.ends_document
        self.open = not row.ends_document

    def _append_marked(self, row: Row, document: Document) -> None:
        """Takes in a document whose tokens say whether they are learnt; its end is learnt where its last token is."""
        ids, learn = np.asarray(document.ids, self.dtype), document.learn
        assert learn is not None
        before, after = int(self.bos is not None), int(not len(ids) or ids[-1] != self.eos)
        part = self.part
        part.ids.append(np.pad(ids, (before, after), constant_values=(self.bos or 0, self.eos)))
        part.learn.append(np.pad(learn, (before, after), constant_values=(False, bool(len(learn)) and bool(learn[-1]))))
        part.lengths.append(len(part.ids[-1]))
        part.rows.append(row.number - part.row_start)
        part.documents += 1

    def _commit(self, row_end: int) -> None:
        self._encode()
        part, name = self.part, part_name(self.job.index, self.index)
        blobs = {
            "bin": np.concatenate(part.ids).tobytes() if part.ids else b"",
            "len": np.asarray(part.lengths, "<u4").tobytes(),
            "row": np.asarray(part.rows, "<u4").tobytes(),
        }
        if self.job.format.marks:
            learn = np.concatenate(part.learn) if part.learn else np.zeros(0, bool)
            blobs["msk"] = pack_marks(learn, np.asarray(part.lengths, np.int64))
        for kind, blob in blobs.items():
            self.job.store.write(part_key(name, kind), blob)
        record: dict[str, Any] = {
            "shard": self.job.index,
            "part": self.index,
            "rows": [part.row_start, row_end],
            "tokens": len(blobs["bin"]) // self.dtype.itemsize,
            "documents": part.documents,
            "continues": part.continues,
            "open": self.open,
            "text_bytes": part.text_bytes,
            "empty": part.empty,
            "replaced": part.replaced,
            "bad": len(part.bad),
            "bad_examples": part.bad[:5],
            "blobs": {
                kind: {"bytes": len(blob), "sha256": hashlib.sha256(blob).hexdigest()} for kind, blob in blobs.items()
            },
        }
        self.job.store.write(part_key(name, "json"), canonical_json(record))
        self.index += 1
        self.part = Part(row_end, continues=self.open)
