"""Indexes a shard of ready-made tokens: records the document ends and a hash, but does not copy the tokens.

Shape letters: T tokens of a part, D documents of a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.data.cache.checksums import file_record
from lm_trainer.data.cache.format import part_key, part_name, read_record, shard_key, token_dtype
from lm_trainer.data.cache.loss_mask import pack_loss_mask
from lm_trainer.data.cache.token_location import TokenLocation
from lm_trainer.data.sources.tokens import TokenArray, TokenShard
from lm_trainer.data.tokenize.progress import Stopped
from lm_trainer.data.tokenize.shard_reader import ShardJob

PART_TOKENS = 1 << 24
"""Number of tokens per part; the last part of a file may be shorter."""


class _PartStart(NamedTuple):
    """The start of a part."""

    part: int
    row: int
    """Number of tokens of the shard that precede this part."""
    continues: bool
    """True if the part starts inside a document."""


def index_tokens(
    job: ShardJob, on_rows: Callable[[int], None] | None = None, stopped: Callable[[], bool] = lambda: False
) -> None:
    """Writes every missing part of the shard, without its tokens.

    Takes the arguments of `write_shard` and raises its errors.
    """
    shard = job.shard
    assert isinstance(shard, TokenShard)
    arrays = shard.token_arrays(token_dtype(job.tokenizer.vocab_size))
    start, documents = _PartStart(0, 0, False), 0
    for number, array in enumerate(arrays):
        ends_D = shard.read_document_ends(number, array)
        if ends_D is not None and not shard.by_index:
            _check_ends(job, array, ends_D)
        for first in range(0, array.count, PART_TOKENS):
            record = read_record(job.store, part_name(job.index, start.part))
            if record is None:
                if stopped():
                    raise Stopped
                count = min(PART_TOKENS, array.count - first)
                source = TokenLocation(array.path, array.kind, array.dtype, array.header, first)
                record = _index_part(job, start, source, count, ends_D)
                if on_rows is not None:
                    on_rows(record["text_bytes"])
            start = _PartStart(start.part + 1, record["rows"][1], record["open"])
            documents += record["documents"]
    shard.check_unchanged()
    if start.row and not documents:
        raise UserError(
            f"{arrays[0].name}: its {start.row} tokens hold no end-of-document token (id {job.tokenizer.eos_id}) of "
            "data.tokenizer; is it the tokenizer that they were made with? If they were written without such a token, "
            "data.source: {type: tokens, document_ends: file} makes a document of each file"
        )
    job.store.write_json(shard_key(job.index), {"parts": start.part})


def _check_ends(job: ShardJob, array: TokenArray, ends_D: np.ndarray) -> None:
    """Checks that every document of an index ends with EOS.

    Raises:
        UserError: if a document does not; names the first one.
    """
    tokens = TokenLocation(array.path, array.kind, array.dtype, array.header, 0).open(array.count)
    begin = 0
    for first in range(0, array.count, PART_TOKENS):
        last = min(first + PART_TOKENS, array.count)
        stop = int(np.searchsorted(ends_D, last, side="right"))
        lasts = ends_D[begin:stop]
        lasts = np.maximum(lasts - 1 - first, 0)
        last_ids = np.asarray(tokens[first:last])[lasts]
        # An empty document has no last token.
        empty = np.diff(ends_D[begin:stop], prepend=ends_D[begin - 1] if begin else 0) == 0
        if wrong := np.flatnonzero((last_ids != job.tokenizer.eos_id) & ~empty).tolist():
            raise UserError(
                f"{array.name}: document {begin + wrong[0]} of its index ends with the token {last_ids[wrong[0]]}, not "
                f"with the end-of-document token {job.tokenizer.eos_id} of data.tokenizer. If documents were written "
                "without such a token, set data.source.document_ends: index"
            )
        begin = stop


def _index_part(
    job: ShardJob, start: _PartStart, source: TokenLocation, count: int, ends_D: np.ndarray | None
) -> dict[str, Any]:
    """Writes the index and the commit record of one part. Returns the record."""
    shard, name = job.shard, part_name(job.index, start.part)
    assert isinstance(shard, TokenShard)
    ids_T = np.ascontiguousarray(source.open(count)[0:count])
    _check_ids(job, source, ids_T)
    if shard.by_index and ends_D is not None:
        documents = slice(*np.searchsorted(ends_D, [source.first, source.first + count], side="right"))
        ends = np.unique(ends_D[documents]) - source.first
    else:
        ends = np.flatnonzero(ids_T == job.tokenizer.eos_id) + 1
    is_open = not len(ends) or int(ends[-1]) != count
    edges = np.concatenate([[0], ends, [count]] if is_open else [[0], ends])
    lengths = np.diff(edges)
    blobs = {"len": lengths.astype("<u4").tobytes(), "row": edges[:-1].astype("<u4").tobytes()}
    if shard.by_index:
        ended = lengths[:-1] if is_open else lengths
        blobs["msk"] = pack_loss_mask(np.ones(count, bool), ended)
    for kind, blob in blobs.items():
        job.store.write(part_key(name, kind), blob)
    record = {
        "shard": job.index,
        "part": start.part,
        "rows": [start.row, start.row + count],
        "documents": len(ends),
        "continues": start.continues,
        "open": is_open,
        "text_bytes": ids_T.nbytes,
        "tokens": count,
        **{"empty": 0, "replaced": 0, "bad": 0, "bad_examples": []},
        "blobs": {kind: file_record(blob) for kind, blob in blobs.items()},
        "place": {**source._asdict(), **file_record(ids_T)},
    }
    job.store.write_json(part_key(name, "json"), record)
    return record


def _check_ids(job: ShardJob, source: TokenLocation, ids_T: np.ndarray) -> None:
    """Checks that the ids are in the vocabulary.

    An id outside the vocabulary would read the wrong row of the embedding.

    Raises:
        UserError: if they are not; names the first wrong id, or the type in which the file was actually written.
    """
    vocab_size = job.tokenizer.vocab_size
    assert isinstance(job.shard, TokenShard)
    if (problem := job.shard.dtype_problem(ids_T, source.header, vocab_size, job.tokenizer.eos_id)) is not None:
        raise UserError(f"{source.path}: {problem}")
    if int(ids_T.max()) < vocab_size and int(ids_T.min()) >= 0:
        return
    index = int(np.flatnonzero((ids_T < 0) | (ids_T >= vocab_size))[0])
    raise UserError(
        f"{source.path}: token {source.first + index} is {ids_T[index]}, but data.tokenizer has {vocab_size} tokens; "
        "it is not the tokenizer that the file was made with, or the ids are of another type"
    )
