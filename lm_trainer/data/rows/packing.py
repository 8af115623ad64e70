"""Packs full documents into rows. The plan depends only on the documents' lengths, so rows have random access.

No token is cropped. A document that fits a row is never split; a longer one fills full rows, and its remainder is
packed like a document. In return, a row may end in padding if no document is left that fits. On the embedded corpus
with its own tokenizer and rows of 2,048, packing uses 99.92 % of the positions and splits 50 % of the documents, all of
them longer than a row; chunks use 99.98 % and split 67 %. `lmt data stats` prints these figures for any data.

Shape letters: D documents, P pieces (documents, or parts of long ones), R rows of the plan, B rows of a batch, S
positions, N runs of a batch (its pieces and its padding).
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.data.cache.format import fingerprint
from lm_trainer.data.cache.kvstore import KvStore, parse_checked_json
from lm_trainer.data.cache.loss_mask import IN_LOSS
from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.formats.too_long import TooLong
from lm_trainer.data.rows.chunks import PADDING_SEGMENT
from lm_trainer.data.tokenize.open_cache import OpenCache

GROUP = 4096
"""Number of documents packed together. More documents fill rows better; fewer preserve the order of the corpus."""

_FORMAT = 1


class PackingPlan(NamedTuple):
    """A packing plan, which gives the runs of the stream in each row."""

    starts_P: np.ndarray
    """int64: position in the stream of the first input of each piece."""
    lengths_P: np.ndarray
    """int32: number of inputs of each piece. Its targets are the same run shifted by one."""
    firsts_R: np.ndarray
    """int64 [R + 1]: the first piece of each row, followed by the number of pieces."""

    @property
    def num_rows(self) -> int:
        return len(self.firsts_R) - 1

    def to_bytes(self) -> bytes:
        """Encodes the plan. The arrays of 8-byte integers come first, so that views of a file are aligned."""
        return b"".join(array.tobytes() for array in (self.starts_P, self.firsts_R, self.lengths_P))

    @classmethod
    def from_bytes(cls, content: bytes | np.ndarray, pieces: int, rows: int) -> Self:
        """Decodes the bytes of `to_bytes` into views of them."""
        content = np.frombuffer(content, np.uint8) if isinstance(content, bytes) else content
        starts, firsts, lengths = np.split(content, np.cumsum([pieces * 8, (rows + 1) * 8]))
        return cls(starts.view("<i8"), lengths.view("<i4"), firsts.view("<i8"))


def pack_best_fit(
    lengths_D: np.ndarray,
    seq_len: int,
    stop: int | None = None,
    group: int = GROUP,
    first: int = 0,
    *,
    too_long: TooLong = "split",
) -> PackingPlan:
    """Packs documents without splitting any that fit: best fit, longest first, within each group of documents.

    A document of n tokens takes n - 1 positions, because its last token is only a target. By default, a document longer
    than a row is split into full rows, and its remainder is packed like a document (Ding et al., "Fewer truncations
    improve language modeling", 2024). Documents of one token take no position and appear in no row.

    Args:
        lengths_D: int64, number of tokens of each document of a stream, including its end-of-document token.
        seq_len: S.
        stop: exclusive end of the tokens to pack; None means no limit.
        group: number of documents in a group.
        first: first token that must be a target. Its document is read from the beginning or, if it is longer than a
            row, from the preceding split.
        too_long: treatment of documents that are longer than a row; `raise` is the same as `split` here.
    """
    starts_D = np.cumsum(lengths_D) - lengths_D
    if first:
        selected = starts_D + lengths_D > first
        starts_D, lengths_D = starts_D[selected], lengths_D[selected]
        skipped = np.maximum(first - 1 - starts_D[:1], 0) // seq_len * seq_len
        starts_D[:1] += skipped
        lengths_D[:1] -= skipped
    if stop is not None:
        selected = starts_D < stop
        starts_D = starts_D[selected]
        lengths_D = np.minimum(lengths_D[selected], stop - starts_D)
    starts_D, lengths_D = _fit_documents(starts_D, lengths_D, seq_len, too_long)
    groups = [
        _pack_group(starts_D[first : first + group], lengths_D[first : first + group] - 1, seq_len)
        for first in range(0, len(lengths_D), group)
    ]
    groups = groups or [(np.zeros(0, np.int64),) * 3]
    starts, lengths, counts = (np.concatenate([np.zeros(0, np.int64), *arrays]) for arrays in zip(*groups, strict=True))
    return PackingPlan(starts, lengths.astype(np.int32), np.concatenate([[0], np.cumsum(counts)]))


def _fit_documents(
    starts_D: np.ndarray, lengths_D: np.ndarray, seq_len: int, too_long: TooLong
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the starts and lengths of the parts of documents to pack. Only `split` leaves any longer than a row."""
    excess_D = np.maximum(lengths_D - 1 - seq_len, 0)
    if too_long == "skip":
        return starts_D[excess_D == 0], lengths_D[excess_D == 0]
    if too_long == "left":
        return starts_D + excess_D, lengths_D - excess_D
    return starts_D, lengths_D - excess_D if too_long == "right" else lengths_D


def _pack_group(starts_D: np.ndarray, inputs_D: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the starts and lengths of the pieces in row order, and the number of pieces of each row.

    Rows filled by a single piece come first, then packed rows in the order in which they were opened.
    """
    full_D, remainders_D = np.divmod(inputs_D, seq_len)
    pieces = np.arange(full_D.sum()) - np.repeat(np.cumsum(full_D) - full_D, full_D)
    full_starts = np.repeat(starts_D, full_D) + pieces * seq_len
    rows: list[list[int]] = []
    # The remaining room and the number of each open row in one integer, sorted. Bisection finds the tightest fit and,
    # among equal ones, the earliest row, so the plan depends only on the lengths.
    num_documents = len(remainders_D)
    room: list[int] = []
    # The sort is stable, so documents of equal length keep their order on every machine.
    order = np.argsort(-remainders_D, kind="stable")
    for index, length in zip(order.tolist(), remainders_D[order].tolist(), strict=True):
        if length == 0:
            break
        slot = bisect.bisect_left(room, length * num_documents)
        if slot == len(room):
            left, row = seq_len, len(rows)
            rows.append([])
        else:
            left, row = divmod(room.pop(slot), num_documents)
        rows[row].append(index)
        if left > length:
            bisect.insort(room, (left - length) * num_documents + row)
    packed = np.asarray([index for row in rows for index in row], np.int64)
    return (
        np.concatenate([full_starts, (starts_D + full_D * seq_len)[packed]]),
        np.concatenate([np.full(len(full_starts), seq_len), remainders_D[packed]]),
        np.asarray([1] * len(full_starts) + [len(row) for row in rows], np.int64),
    )


def _read_stored_plan(store: KvStore, key: str) -> dict[str, Any] | None:
    """Reads the counts of a stored plan; None if it is missing or damaged and has to be recomputed."""
    content = store.read(key)
    try:
        figures = None if content is None else parse_checked_json(content)
    except ValueError:
        return None
    return figures if isinstance(figures, dict) and {"pieces", "rows"} <= figures.keys() else None


def open_packing_plan(
    cache: OpenCache, seq_len: int, stop: int | None = None, first: int = 0, *, too_long: TooLong = "split"
) -> PackingPlan:
    """Reads the plan of a cache for one row length. The first call computes the plan and stores it in the cache.

    Args:
        cache: the cache with the tokens.
        seq_len: number of inputs of a row.
        stop: see `pack_best_fit`.
        first: see `pack_best_fit`.
        too_long: see `pack_best_fit`.
    """
    store = cache.store
    # The key includes all inputs of the plan, so the plan never has to be checked against the tokens.
    excluded = [] if cache.exclusion is None else [cache.exclusion.digest]
    parts: list[dict[str, object]] = [{"first": first}] if first else []
    if too_long not in ("split", "raise"):
        parts.append({"too_long": too_long})
    key = f"packing/{fingerprint([_FORMAT, cache.ledger.sha256, seq_len, stop, GROUP, *excluded, *parts])}"
    record = _read_stored_plan(store, f"{key}.json")
    if record is not None:
        if store.local is not None:
            content: np.ndarray | bytes | None = np.asarray(np.memmap(store.local / f"{key}.bin", np.uint8, "r"))
        else:
            content = store.read(f"{key}.bin", seconds=store.deadline_for(record.get("bytes", 0)))
        # A damaged plan is recomputed, and so is a plan by an earlier version, which wrote no checksum.
        if content is not None and _sha256(content) == record.get("sha256"):
            return PackingPlan.from_bytes(content, record["pieces"], record["rows"])
    # Computed in this process, because a million documents take a second of CPU time, once for all runs.
    plan = pack_best_fit(cache.document_lengths(), seq_len, stop, first=first, too_long=too_long)
    content = plan.to_bytes()
    # If the cache is read-only for this user, the plan is recomputed at the next start.
    with contextlib.suppress(UserError):
        # The JSON file is written last, because it marks the other one as complete.
        store.write(f"{key}.bin", content)
        counts = {"bytes": len(content), "pieces": len(plan.starts_P), "rows": plan.num_rows}
        store.write_json(f"{key}.json", {**counts, "sha256": _sha256(content)})
    return plan


def _sha256(content: bytes | np.ndarray) -> str:
    return hashlib.sha256(np.frombuffer(content, np.uint8).data).hexdigest()


@dataclass(frozen=True)
class PackedRows:
    """The rows of a plan, to train on. Positions without a document are padding, with weight 0 and segment -1."""

    stream: TokenStream
    plan: PackingPlan
    seq_len: int
    eos_id: int

    @property
    def num_rows(self) -> int:
        return self.plan.num_rows

    def read(self, rows_B: np.ndarray) -> Batch:
        """Reads rows.

        All arrays are flat, [B * S], until the end, because pieces are contiguous runs in flat arrays, regardless of
        the rows.
        """
        plan, seq_len, size = self.plan, self.seq_len, len(rows_B) * self.seq_len
        # The pieces of all rows of the batch, row by row: their numbers in the plan, and within their row (from 0).
        firsts_B = plan.firsts_R[rows_B]
        counts_B = plan.firsts_R[rows_B + 1] - firsts_B
        begins_B = np.cumsum(counts_B) - counts_B
        numbers_P = np.arange(counts_B.sum()) - np.repeat(begins_B, counts_B)
        pieces_P = np.repeat(firsts_B, counts_B) + numbers_P
        starts_P, lengths_P = plan.starts_P[pieces_P], plan.lengths_P[pieces_P].astype(np.int64)
        ends_P = np.cumsum(lengths_P)
        # No row of a plan is empty. For empty rows, `reduceat` would give wrong results.
        filled_B = np.add.reduceat(lengths_P, begins_B)
        before_B = np.cumsum(filled_B) - filled_B
        # The beginning of each piece in the flat batch.
        offsets_P = ends_P - lengths_P + np.repeat(np.arange(0, size, seq_len) - before_B, counts_B)

        tokens, targets, positions, segments = block = np.empty((4, size), np.int32)
        block[:2] = self.eos_id
        self._read_pieces(starts_P, lengths_P, offsets_P, tokens, targets)
        # Every row ends with a run of padding, which may be empty.
        row_ends_B = np.cumsum(counts_B)
        runs_N = np.insert(lengths_P, row_ends_B, seq_len - filled_B)
        begins_N = np.insert(offsets_P, row_ends_B, np.arange(0, size, seq_len) + filled_B)
        positions[:] = np.arange(size, dtype=np.int32)
        np.subtract(positions, np.repeat(begins_N.astype(np.int32), runs_N), out=positions)
        segments[:] = np.repeat(np.insert(numbers_P, row_ends_B, PADDING_SEGMENT).astype(np.int32), runs_N)
        weights = (segments >= 0).astype(np.float32)
        if self.stream.loss_mask is not None:
            # Shifted by one token, because the mask applies to the targets.
            mask = np.zeros(size, np.int32)
            self.stream.loss_mask.copy(starts_P + 1, lengths_P, mask, offsets_P)
            weights *= (mask & IN_LOSS) != 0
        tokens, targets, weights, positions, segments = (
            array.reshape(-1, seq_len) for array in (tokens, targets, weights, positions, segments)
        )
        return Batch(tokens, targets, weights, positions, segments)

    def stream_positions(self, rows_B: np.ndarray) -> np.ndarray:
        """Returns the position in the stream of each input: int64 [B, S].

        Padding has the position of the stream's end.
        """
        places_BS = np.full((len(rows_B), self.seq_len), len(self.stream), np.int64)
        for places_S, row in zip(places_BS, rows_B.tolist(), strict=True):
            runs = [np.arange(start, start + length) for start, length in self.token_runs(row)]
            places_S[: sum(map(len, runs))] = np.concatenate(runs)
        return places_BS

    def token_runs(self, row: int) -> list[tuple[int, int]]:
        pieces = slice(int(self.plan.firsts_R[row]), int(self.plan.firsts_R[row + 1]))
        return list(zip(self.plan.starts_P[pieces].tolist(), self.plan.lengths_P[pieces].tolist(), strict=True))

    def rows_containing(self, start: int, stop: int) -> np.ndarray:
        starts_P = self.plan.starts_P
        pieces = np.flatnonzero((starts_P < stop) & (starts_P + self.plan.lengths_P > start))
        return np.unique(np.searchsorted(self.plan.firsts_R, pieces, side="right") - 1)

    def _read_pieces(
        self,
        starts_P: np.ndarray,
        lengths_P: np.ndarray,
        offsets_P: np.ndarray,
        tokens: np.ndarray,
        targets: np.ndarray,
    ) -> None:
        """Reads each piece together with the token after it, and copies it to the inputs and to the targets."""
        # Read once, with the overlap, and copied twice in memory, because reads are slower.
        runs_P = lengths_P + 1
        begins_P = np.cumsum(runs_P) - runs_P
        buffer = np.empty(int(runs_P.sum()), np.int32)
        self.stream.copy(starts_P, runs_P, buffer, begins_P)
        for begin, length, position in zip(begins_P.tolist(), lengths_P.tolist(), offsets_P.tolist(), strict=True):
            tokens[position : position + length] = buffer[begin : begin + length]
            targets[position : position + length] = buffer[begin + 1 : begin + length + 1]
