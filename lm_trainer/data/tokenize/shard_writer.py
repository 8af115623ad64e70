"""Writes one shard: encodes its rows and writes its parts. Deterministic and idempotent.

Shape letters: T tokens of a document or a part.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.core.runtime import short_switch_interval
from lm_trainer.data.cache.checksums import file_record
from lm_trainer.data.cache.format import part_key, part_name, read_record, shard_key, token_dtype
from lm_trainer.data.cache.loss_mask import pack_loss_mask
from lm_trainer.data.formats import EncodedDocument, UnusableRow
from lm_trainer.data.sources import BadRow, Row
from lm_trainer.data.sources.tokens import TokenShard
from lm_trainer.data.tokenize.progress import Stopped
from lm_trainer.data.tokenize.shard_reader import BackgroundStage, RowBatch, ShardJob, map_with_prefetch, read_batches
from lm_trainer.data.tokenize.token_indexer import index_tokens


@dataclass
class OpenPart:
    """Rows encoded since the last commit."""

    row_start: int
    continues: bool
    """True if the first tokens belong to a document that began in an earlier part."""
    ids: list[np.ndarray] = field(default_factory=list)
    in_loss: list[np.ndarray] = field(default_factory=list)
    """One bool per token and one array per document, if the format has a loss mask."""
    features: list[np.ndarray] = field(default_factory=list)
    """Features of each document, if the format stores features."""
    lengths: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    documents: int = 0
    text_bytes: int = 0
    empty: int = 0
    replaced: int = 0
    bad: list[str] = field(default_factory=list)


def write_shard(
    job: ShardJob, *, on_rows: Callable[[int], None] | None = None, stopped: Callable[[], bool] = lambda: False
) -> None:
    """Writes every missing part of the shard, and then the file that marks the shard as complete.

    Args:
        job: the shard and its destination.
        on_rows: called with the number of text bytes in each encoded batch.
        stopped: called before every batch; returns True to stop.

    Raises:
        UserError: if a row is bad and the job does not skip bad rows, or if a file is unreadable.
        MachineError: if the store cannot be written.
        Stopped: if `stopped` returned True.
    """
    if job.store.read(shard_key(job.index)) is not None:
        return
    if isinstance(job.shard, TokenShard):
        index_tokens(job, on_rows, stopped)
    else:
        with short_switch_interval():
            _ShardWriter(job, on_rows, stopped).run()


class _ShardWriter:
    """Writes a shard, starting with its first uncommitted part."""

    def __init__(self, job: ShardJob, on_rows: Callable[[int], None] | None, stopped: Callable[[], bool]):
        self.job, self.on_rows, self.stopped = job, on_rows, stopped
        self.eos, self.bos, self.dtype = (
            job.tokenizer.eos_id,
            job.tokenizer.bos_id if job.format.adds_bos else None,
            token_dtype(job.tokenizer.vocab_size),
        )
        self.begin = None if self.bos is None else np.array([self.bos], self.dtype)
        self.end = np.array([self.eos], self.dtype)
        self.index, row, self.is_open = self._find_resume_point()
        self.part = OpenPart(row, continues=self.is_open)

    def _find_resume_point(self) -> tuple[int, int, bool]:
        """Returns the index of the first uncommitted part, its first row, and True if that row continues a document."""
        index, row, is_open = 0, 0, False
        while (record := read_record(self.job.store, part_name(self.job.index, index))) is not None:
            index, row, is_open = index + 1, record["rows"][1], record["open"]
        return index, row, is_open

    def run(self) -> None:
        batches = read_batches(self.job, part=self.index, row=self.part.row_start, is_open=self.is_open)
        # Most rows are encoded in the caller's thread, which is the same for all shards: fastokens caches words per
        # thread. The writer ends last, so a write error takes precedence over errors in rows read after it.
        with BackgroundStage("write") as writer, closing(map_with_prefetch(batches, self._encode_batch)) as encoded:
            for batch, documents in encoded:
                if self.stopped():
                    raise Stopped
                self._add_documents(batch, documents, writer)
                if self.on_rows and batch.rows:
                    self.on_rows(batch.text_bytes)
        # Written only after the writer has ended, because the file must not count parts that are missing.
        self.job.store.write_json(shard_key(self.job.index), {"parts": self.index})

    def _encode_batch(self, batch: RowBatch) -> list[EncodedDocument | UnusableRow]:
        return self.job.format.encode(batch.values, self.job.tokenizer) if batch.rows else []

    def _add_documents(
        self, batch: RowBatch, documents: list[EncodedDocument | UnusableRow], writer: BackgroundStage
    ) -> None:
        """Adds encoded documents to the open part, and commits the part if the batch ends it."""
        part, usable = self.part, list[tuple[Row, EncodedDocument]]()
        part.text_bytes += batch.text_bytes
        part.empty += batch.empty
        part.replaced += batch.replaced
        part.bad += batch.bad
        for row, document in zip(batch.rows, documents, strict=True):
            if isinstance(document, UnusableRow):
                part.bad.append(self.job.bad_row_line(BadRow(row.number, row.where, str(document))))
            else:
                usable.append((row, document))
        if self.job.format.has_loss_mask:
            for row, document in usable:
                self._append_masked(row, document)
                if document.partner is not None:
                    self._append_masked(row, document.partner)
        elif self.job.format.fields():
            for row, document in usable:
                self._append_ids(row, np.asarray(document.ids, self.dtype))
        elif usable:
            self._append_texts(usable)
        if batch.ends_part:
            self._commit(batch.row_end, writer)

    def _append_texts(self, usable: list[tuple[Row, EncodedDocument]]) -> None:
        """Adds the tokens of texts or pieces of texts."""
        part, pieces = self.part, []
        for row, document in usable:
            tokens = len(document.ids)
            # BOS comes before the first piece of a document, and EOS after its last piece.
            if self.begin is not None and not self.is_open:
                pieces.append(self.begin)
                tokens += 1
            if len(document.ids):
                pieces.append(document.ids)
            if row.ends_document:
                pieces.append(self.end)
                tokens += 1
                part.documents += 1
            self._count_tokens(row, tokens)
        # Concatenated once for the whole batch, since concatenating each document would take several times as long.
        part.ids.append(np.concatenate([np.zeros(0, self.dtype), *pieces], dtype=self.dtype, casting="unsafe"))

    def _append_ids(self, row: Row, ids_T: np.ndarray) -> None:
        """Adds the ids of a row, which may hold several documents, each ended by EOS."""
        ends = np.flatnonzero(ids_T == self.eos)
        for piece in np.split(ids_T, ends + 1)[:-1]:
            self._append_document(row, piece[:-1])
        remainder = ids_T[ends[-1] + 1 :] if len(ends) else ids_T
        # A row without ids is an empty document, but an EOS at the end of a row does not start another document.
        if len(remainder) or not len(ends):
            self._append_document(row, remainder)

    def _append_document(self, row: Row, ids_T: np.ndarray) -> None:
        start = [] if self.begin is None else self.begin
        self.part.ids.append(np.concatenate([start, ids_T, self.end], dtype=self.dtype, casting="unsafe"))
        self._count_tokens(row, len(self.part.ids[-1]))
        self.part.documents += 1

    def _count_tokens(self, row: Row, tokens: int) -> None:
        """Counts the tokens of a document. The tokens of a piece are added to the open document."""
        part = self.part
        # In a new part, even a continued document gets a new entry. Readers add up the pieces.
        if self.is_open and part.lengths:
            part.lengths[-1] += tokens
        else:
            part.lengths.append(tokens)
            part.rows.append(row.number - part.row_start)
        self.is_open = not row.ends_document

    def _append_masked(self, row: Row, document: EncodedDocument) -> None:
        """Adds a document with a loss mask. Its EOS counts in the loss if its last token does."""
        ids_T, mask_T = np.asarray(document.ids, self.dtype), document.loss_mask
        assert mask_T is not None
        # No EOS is added if the chat template has already written one.
        num_bos, num_eos = int(self.bos is not None), int(not len(ids_T) or ids_T[-1] != self.eos)
        part = self.part
        part.ids.append(np.pad(ids_T, (num_bos, num_eos), constant_values=(self.bos or 0, self.eos)))
        end_in_loss = bool(len(mask_T)) and bool(mask_T[-1])
        part.in_loss.append(np.pad(mask_T, (num_bos, num_eos), constant_values=(False, end_in_loss)))
        part.lengths.append(len(part.ids[-1]))
        part.rows.append(row.number - part.row_start)
        part.documents += 1
        if document.features is not None:
            part.features.append(document.features)

    def _commit(self, row_end: int, writer: BackgroundStage) -> None:
        part, name = self.part, part_name(self.job.index, self.index)
        record: dict[str, object] = {
            "shard": self.job.index,
            "part": self.index,
            "rows": [part.row_start, row_end],
            "documents": part.documents,
            "continues": part.continues,
            "open": self.is_open,
            "text_bytes": part.text_bytes,
            "empty": part.empty,
            "replaced": part.replaced,
            "bad": len(part.bad),
            "bad_examples": part.bad[:5],
        }
        writer.submit(_write_part, self.job, name, part, record)
        self.index += 1
        self.part = OpenPart(row_end, continues=self.is_open)


def _write_part(job: ShardJob, name: str, part: OpenPart, record: dict[str, object]) -> None:
    """Writes the files of a part and, last, the record that commits them.

    Raises:
        UserError: if the tokenizer encoded text as its end-of-document token.
    """
    tokens = b"".join(ids.data for ids in part.ids)
    ids_T = np.frombuffer(tokens, token_dtype(job.tokenizer.vocab_size))
    # Checked once per part, because a check per batch would make the encoding threads wait for each other.
    if not job.format.has_loss_mask and np.count_nonzero(ids_T == job.tokenizer.eos_id) != part.documents:
        location = _find_eos_location(job, part)
        raise UserError(
            f"{location}: the tokenizer makes its end-of-document token (id {job.tokenizer.eos_id}) "
            "out of text; it cannot be used for training"
        )
    blobs = {
        "bin": tokens,
        "len": np.asarray(part.lengths, "<u4").tobytes(),
        "row": np.asarray(part.rows, "<u4").tobytes(),
    }
    if job.format.has_loss_mask:
        in_loss = np.concatenate(part.in_loss) if part.in_loss else np.zeros(0, bool)
        blobs["msk"] = pack_loss_mask(in_loss, np.asarray(part.lengths, np.int64))
    if job.format.keeps_features:
        blobs["fea"] = b"".join(features.astype("<f4").tobytes() for features in part.features)
    for kind, blob in blobs.items():
        job.store.write(part_key(name, kind), blob)
    record["tokens"] = len(ids_T)
    record["blobs"] = {kind: file_record(blob) for kind, blob in blobs.items()}
    job.store.write_json(part_key(name, "json"), record)


def _find_eos_location(job: ShardJob, part: OpenPart) -> str:
    """Rereads a part to find the first row whose encoded text contains the end-of-document token."""
    for batch in read_batches(job, part=0, row=part.row_start, is_open=part.continues):
        for row, document in zip(batch.rows, job.format.encode(batch.values, job.tokenizer), strict=True):
            if isinstance(document, EncodedDocument) and job.tokenizer.eos_id in np.asarray(document.ids):
                return row.where
    return job.store.url
