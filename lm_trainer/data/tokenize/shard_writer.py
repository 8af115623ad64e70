"""Reads one shard of a source and writes its parts. Deterministic and idempotent: anyone may run it twice.

Threads read, encode and write at once, since tokenizers and files leave the interpreter to others meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.data.cache.format import part_key, part_name, read_record, shard_key, token_dtype
from lm_trainer.data.cache.kvstore import canonical_json
from lm_trainer.data.cache.loss_mask import pack_marks
from lm_trainer.data.formats import Document, Unusable
from lm_trainer.data.sources import BadRow, Row
from lm_trainer.data.tokenize.shard_reader import Behind, Job, RowBatch, ahead, read_batches


class Stopped(Exception):
    """The build was asked to stop; what is committed stays."""


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
        self.begin = None if self.bos is None else np.array([self.bos], self.dtype)
        self.end = np.array([self.eos], self.dtype)
        self.index, row, self.open = self._resume()
        self.part = Part(row, continues=self.open)

    def _resume(self) -> tuple[int, int, bool]:
        """The first part that is not committed, its first row, and whether a document is open there."""
        index, row, is_open = 0, 0, False
        while (record := read_record(self.job.store, part_name(self.job.index, index))) is not None:
            index, row, is_open = index + 1, record["rows"][1], record["open"]
        return index, row, is_open

    def run(self) -> None:
        batches = ahead(read_batches(self.job, part=self.index, row=self.part.row_start, is_open=self.open))
        # Encoding stays in the caller's thread from shard to shard: fastokens remembers words for each thread. What
        # could not be written comes before any error in what was read after it: the writer ends last.
        with closing(batches), Behind("write") as writer, Behind("take") as taker:
            for batch in batches:
                if self.stopped():
                    raise Stopped
                documents = self.job.format.encode(batch.values, self.job.tokenizer) if batch.rows else []
                taker.do(self._take, batch, documents, writer)
                if self.on_rows and batch.rows:
                    self.on_rows(batch.text_bytes)
        self.job.store.write_json(shard_key(self.job.index), {"parts": self.index})

    def _take(self, batch: RowBatch, documents: list[Document | Unusable], writer: Behind) -> None:
        """Takes in what has been encoded, and commits the part that it ends."""
        part, usable = self.part, list[tuple[Row, Document]]()
        part.text_bytes += batch.text_bytes
        part.empty += batch.empty
        part.replaced += batch.replaced
        part.bad += batch.bad
        for row, document in zip(batch.rows, documents, strict=True):
            if isinstance(document, Unusable):
                part.bad.append(self.job.refuse(BadRow(row.number, row.where, str(document))))
            else:
                usable.append((row, document))
        if self.job.format.marks:
            for row, document in usable:
                self._append_marked(row, document)
        elif self.job.format.fields():
            for row, document in usable:
                self._append_ids(row, np.asarray(document.ids, self.dtype))
        elif usable:
            self._append_texts(usable)
        if batch.ends_part:
            self._commit(batch.row_end, writer)

    def _append_texts(self, usable: list[tuple[Row, Document]]) -> None:
        """Takes in texts and pieces of texts."""
        part, pieces, documents = self.part, [], 0
        for row, document in usable:
            tokens = len(document.ids)
            if self.begin is not None and not self.open:
                pieces.append(self.begin)
                tokens += 1
            if len(document.ids):
                pieces.append(document.ids)
            if row.ends_document:
                pieces.append(self.end)
                tokens += 1
                documents += 1
            self._count(row, tokens)
        ids = np.concatenate(pieces, dtype=self.dtype, casting="unsafe") if pieces else np.zeros(0, self.dtype)
        if np.count_nonzero(ids == self.eos) != documents:
            where = next(row.where for row, document in usable if self.eos in np.asarray(document.ids))
            raise UserError(
                f"{where}: the tokenizer makes its end-of-document token (id {self.eos}) out of text; "
                "it cannot be used for training"
            )
        part.ids.append(ids)
        part.documents += documents

    def _append_ids(self, row: Row, ids: np.ndarray) -> None:
        """Takes in ids, in which EOS ends documents."""
        ends = np.flatnonzero(ids == self.eos)
        for piece in np.split(ids, ends + 1)[:-1]:
            self._append_document(row, piece[:-1])
        rest = ids[ends[-1] + 1 :] if len(ends) else ids
        if len(rest) or not len(ends):
            self._append_document(row, rest)

    def _append_document(self, row: Row, ids: np.ndarray) -> None:
        before = [] if self.begin is None else self.begin
        self.part.ids.append(np.concatenate([before, ids, self.end], dtype=self.dtype, casting="unsafe"))
        self._count(row, len(self.part.ids[-1]))
        self.part.documents += 1

    def _count(self, row: Row, tokens: int) -> None:
        """Notes a document, or a piece of one that belongs to what is open."""
        part = self.part
        if self.open and part.lengths:
            part.lengths[-1] += tokens
        else:
            part.lengths.append(tokens)
            part.rows.append(row.number - part.row_start)
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

    def _commit(self, row_end: int, writer: Behind) -> None:
        part, name = self.part, part_name(self.job.index, self.index)
        record: dict[str, Any] = {
            "shard": self.job.index,
            "part": self.index,
            "rows": [part.row_start, row_end],
            "documents": part.documents,
            "continues": part.continues,
            "open": self.open,
            "text_bytes": part.text_bytes,
            "empty": part.empty,
            "replaced": part.replaced,
            "bad": len(part.bad),
            "bad_examples": part.bad[:5],
        }
        writer.do(_write, self.job, name, part, record)
        self.index += 1
        self.part = Part(row_end, continues=self.open)


def _write(job: Job, name: str, part: Part, record: dict[str, Any]) -> None:
    """Writes the files of a part and, last, the record that commits them."""
    blobs = {
        "bin": b"".join(ids.data for ids in part.ids),
        "len": np.asarray(part.lengths, "<u4").tobytes(),
        "row": np.asarray(part.rows, "<u4").tobytes(),
    }
    if job.format.marks:
        learn = np.concatenate(part.learn) if part.learn else np.zeros(0, bool)
        blobs["msk"] = pack_marks(learn, np.asarray(part.lengths, np.int64))
    for kind, blob in blobs.items():
        job.store.write(part_key(name, kind), blob)
    record["tokens"] = len(blobs["bin"]) // token_dtype(job.tokenizer.vocab_size).itemsize
    record["blobs"] = {
        kind: {"bytes": len(blob), "sha256": hashlib.sha256(blob).hexdigest()} for kind, blob in blobs.items()
    }
    job.store.write(part_key(name, "json"), canonical_json(record))
