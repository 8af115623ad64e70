"""Explains a spike: the rows, documents and tokens whose gradient makes the gradient of a step large.

Shape letters: B is the number of rows, S the number of positions in a row.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.data.provenance import RowDocuments, documents_of_step
from lm_trainer.reproduce.record import RunRecord
from lm_trainer.reproduce.replay import find_start_of_step
from lm_trainer.reproduce.rerun import Rerun, open_rerun
from lm_trainer.reproduce.tokens import HardToken, compute_token_losses, find_hardest_tokens
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.step.check.part_gradients import PartSums
from lm_trainer.step.check.recompute import HostMicrobatch
from lm_trainer.step.dispatch.device_groups import pad_rows
from lm_trainer.step.elastic import ElasticStep
from lm_trainer.trackers import Progress

_BASELINE_STEPS = 20
"""Number of recorded steps before the spike whose median is its usual level."""
_SPIKE = 1.05
"""Ratio of a value to its usual level from which a document can explain it."""
_MAX_PIECES = 64
"""Maximum number of parts of documents whose gradient is computed. The highest total losses are chosen."""


class Piece(NamedTuple):
    """The part of a document that is in a row."""

    set: str
    document: int
    where: str
    row: int
    start: int
    stop: int
    """Positions [start, stop) of the row."""


@dataclass(frozen=True)
class StepSize:
    """Mean loss and gradient norm of a step."""

    loss: float
    grad_norm: float
    """Norm of the gradient of the mean loss, before clipping."""
    tokens: float
    """Sum of the weights of the tokens."""

    def __str__(self) -> str:
        return f"the loss would be {self.loss:.4g} and the gradient norm {self.grad_norm:.4g}"


@dataclass(frozen=True)
class RowNorm:
    """The contribution of a row to the gradient."""

    row: int
    """Number of the row in the batch, counted from 0."""
    set: str
    loss: float
    """Mean loss of its tokens."""
    tokens: float
    norm: float
    """Norm of its part of the gradient of the mean loss: without the other rows, but with the same divisor."""


@dataclass(frozen=True)
class DocumentNorm:
    """The contribution of a document to the gradient, and the step without it."""

    set: str
    document: int
    """Number of the document in its set, counted from 0."""
    where: str
    rows: list[int]
    """Rows of the batch that contain a part of it."""
    loss: float
    tokens: float
    norm: float
    """Norm of its part of the gradient of the mean loss; an upper bound if it is in several rows."""
    without: StepSize
    """The step if none of the document's tokens counted, computed exactly."""

    def describe(self) -> str:
        """Returns the number and the source of the document."""
        return f"document {self.document} of {self.set} ({self.where})"


@dataclass(frozen=True)
class TokenNorm:
    """The contribution of a token to the gradient."""

    token: HardToken
    norm: float


@dataclass(frozen=True)
class Spike:
    """The analysis of a step."""

    run: str
    step: int
    size: StepSize
    usual: StepSize | None
    """Median loss and gradient norm of the steps before; None if none is recorded."""
    rows: list[RowNorm]
    """All rows, the largest norm first."""
    documents: list[DocumentNorm]
    """Documents of the rows with the largest norms, the smallest gradient norm without the document first."""
    together: StepSize | None
    """The step without all of `documents`."""
    tokens: list[TokenNorm]
    """Tokens with the highest losses of the first document."""
    microbatches: int = 0
    """Number of microbatches that were computed."""
    steps: float = 0.0
    """The same work in steps of the run."""

    @property
    def explained(self) -> bool:
        """True if the first document makes at least half of what the gradient norm is above its usual level."""
        return bool(self.documents) and self._explains_norm(self.documents[0].without)

    def _explains_norm(self, without: StepSize) -> bool:
        usual = None if self.usual is None else self.usual.grad_norm
        return _explains(without.grad_norm, self.size.grad_norm, usual)

    def sentence(self) -> str:
        """Returns the result in a sentence."""
        usual = "" if self.usual is None else f" (usually {self.usual.loss:.4g} and {self.usual.grad_norm:.4g})"
        size = (
            f"step {self.step} of {self.run}: loss {self.size.loss:.4g}, gradient norm {self.size.grad_norm:.4g}{usual}"
        )
        if not self.documents:
            return f"{size}; no token of the batch counts"
        if self.explained:
            return f"{size}. {self.documents[0].describe()} makes it: without it, {self.documents[0].without}"
        if self.together is not None and self._explains_norm(self.together):
            numbers = ", ".join(f"{x.set}:{x.document}" for x in self.documents)
            return f"{size}. Several documents make it: without {numbers}, {self.together}"
        loudest = min(self.documents, key=lambda document: document.without.loss)
        if self.usual is not None and _explains(loudest.without.loss, self.size.loss, self.usual.loss):
            return f"{size}. {loudest.describe()} makes the loss: without it, {loudest.without}"
        if self.usual is not None and self.size.grad_norm <= _SPIKE * self.usual.grad_norm:
            return (
                f"{size}: no spike. {self.documents[0].describe()} has the largest effect: without it, "
                f"{self.documents[0].without}"
            )
        return (
            f"{size}. No document makes it: {self.documents[0].describe()} has the largest effect, and without it, "
            f"{self.documents[0].without}. Look at the update before it: `lmt bisect spike {self.run} --step "
            f"{self.step - 1}`"
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as JSON values, but for numbers that are not finite."""
        tokens = [{**token.token._asdict(), "norm": token.norm} for token in self.tokens]
        return {**asdict(self), "tokens": tokens, "explained": self.explained, "sentence": self.sentence()}


def _explains(without: float, value: float, usual: float | None) -> bool:
    """Returns True if at least half of what a value is above its usual level is gone without a document."""
    if not math.isfinite(value):
        return math.isfinite(without)
    base = 0.0 if usual is None else usual
    return value > _SPIKE * base and without - base <= (value - base) / 2


def explain_spike(
    record: RunRecord, step: int, *, top_k: int, overrides: Sequence[str] = (), progress: Progress
) -> Spike:
    """Computes a step again, and the gradients of its rows, of documents in it, and of tokens.

    This takes as much work as about `top_k` steps, and as many more as a microbatch has rows.

    Args:
        record: the run.
        step: the step, counted from 1.
        top_k: number of rows whose documents are examined, and of documents and tokens to report.
        overrides: settings `KEY=VALUE` that override the configuration and do not affect the numbers.
        progress: shows the current phase.

    Raises:
        UserError: if the run has no such step, or its loss is not a sum over the tokens of documents.
    """
    start = find_start_of_step(record, step)
    check_has_tokens(record.load_config(step))
    with open_rerun(record, start, overrides=overrides, progress=progress) as rerun:
        rerun.run_until(step - 1)
        rerun.compile()
        documents = [*documents_of_step(rerun.run.data, rerun.run.config.trainer.batch_schedule, step)]
        return _Analysis(rerun, documents, top_k, progress).run(record)


def check_has_tokens(config: RunConfig) -> None:
    """Raises `UserError` unless the loss is a sum over the tokens of documents, which can count or not."""
    config.data.require_documents()
    if config.loss.content != "documents" or config.data.features_shape is not None:
        raise UserError(
            f"loss.type {config.loss.type}: only tokens of documents of text can be left out of a step, not pairs of "
            "answers or recordings; `lmt replay` shows the step"
        )
    if not config.trainer.bitwise:
        raise UserError(
            "trainer.determinism: fast has no gradients of single microbatches; `lmt replay` shows the step"
        )


class _Analysis:
    """Computes parts of the gradient of the next step of a recomputed run."""

    def __init__(self, rerun: Rerun, documents: Sequence[RowDocuments], top_k: int, progress: Progress):
        step, self._state = rerun.run.setup.step, rerun.state
        assert isinstance(step, ElasticStep)
        self._rerun, self._documents, self._top_k, self._progress, self._step = rerun, documents, top_k, progress, step
        self._batch = rerun.next_batch()
        self._plan = step.plans.at(self._state.step)
        self._padded = pad_rows(self._batch, self._plan.count * self._plan.rows)
        self._weights_BS = np.asarray(self._batch.weights)
        self._microbatches = 0

    def run(self, record: RunRecord) -> Spike:
        self._progress.phase("the gradient of the step")
        size, step = self._measure(self._weights_BS), self._state.step + 1
        self._progress.phase("the gradient of each row")
        rows = self._row_norms(size.tokens)
        losses_BS = compute_token_losses(self._rerun.run.setup, self._rerun.run.config, self._state, self._batch)
        self._progress.phase("the gradient of documents")
        documents = self._document_norms([row.row for row in rows[: self._top_k]], losses_BS, size.tokens)
        together = None
        if len(documents) > 1:
            together = self._measure(self._without({(x.set, x.document) for x in documents}))
        tokens = []
        if documents:
            self._progress.phase("the gradient of tokens")
            tokens = self._token_norms((documents[0].set, documents[0].document), losses_BS, size.tokens)
        return Spike(
            record.id,
            step,
            size,
            _usual_size(record, step),
            rows,
            documents,
            together,
            tokens,
            self._microbatches,
            round(self._microbatches / self._plan.count, 2),
        )

    def _pieces(self) -> Iterator[Piece]:
        """Yields the parts of documents in the rows of the batch, in order."""
        for row in self._documents:
            start = 0
            for passage in row.passages:
                stop = start + passage.tokens
                yield Piece(row.origin.set.name, passage.document, passage.where, row.row, start, stop)
                start = stop

    def _measure(self, weights_BS: np.ndarray) -> StepSize:
        """Computes loss and gradient norm of the step with other weights of the tokens, exactly as a step does."""
        self._microbatches += self._plan.count
        placed = self._step.put(self._batch._replace(weights=weights_BS), self._state.step)
        sums = self._step.gradient(self._state, placed)
        loss, weight = (np.float32(np.asarray(sums.scalars[name].addressable_data(0))) for name in ("loss", "weight"))
        squares = np.float32(np.asarray(self._step.squares(sums.tree).addressable_data(0)))
        divisor = weight or np.float32(np.inf)
        return StepSize(float(loss / divisor), float(np.sqrt(squares) / divisor), float(weight))

    def _without(self, documents: set[tuple[str, int]]) -> np.ndarray:
        """Returns the weights [B, S] without the tokens of documents."""
        weights_BS = self._weights_BS.copy()
        for piece in self._pieces():
            if (piece.set, piece.document) in documents:
                weights_BS[piece.row, piece.start : piece.stop] = 0
        return weights_BS

    def _compute_parts(self, spans: Sequence[tuple[int, int, int]]) -> list[PartSums]:
        """Computes the sums over positions [start, stop) of rows, each `(row, start, stop)`."""
        self._microbatches += len(spans)
        return self._step.part_gradients(self._state).compute([self._part(*span) for span in spans])

    def _part(self, row: int, start: int, stop: int) -> HostMicrobatch:
        size = self._plan.rows
        index, first = row // size, row // size * size
        weights = np.zeros_like(self._padded.weights[first : first + size])
        weights[row - first, start:stop] = self._weights_BS[row, start:stop]
        rows = jax.tree.map(lambda array: np.asarray(array)[first : first + size], self._padded)
        return HostMicrobatch(rows._replace(weights=weights), index)

    def _row_norms(self, tokens: float) -> list[RowNorm]:
        rows, length = range(len(self._weights_BS)), self._weights_BS.shape[1]
        sums = self._compute_parts([(row, 0, length) for row in rows])
        sets = {row.row: row.origin.set.name for row in self._documents}
        norms = [
            RowNorm(row, sets[row], _ratio(part.loss, part.weight), part.weight, _norm(part, tokens))
            for row, part in zip(rows, sums, strict=True)
        ]
        return sorted(norms, key=lambda norm: _largest_first(norm.norm))

    def _document_norms(self, rows: Sequence[int], losses_BS: np.ndarray, tokens: float) -> list[DocumentNorm]:
        def total_loss(piece: Piece) -> float:
            return _largest_first(float(np.nansum(losses_BS[piece.row, piece.start : piece.stop])))

        counted = [
            piece for piece in self._pieces() if np.any(self._weights_BS[piece.row, piece.start : piece.stop] > 0)
        ]
        chosen = {(piece.set, piece.document) for piece in counted if piece.row in rows}
        examined = sorted((piece for piece in counted if (piece.set, piece.document) in chosen), key=total_loss)
        examined = examined[:_MAX_PIECES]
        sums = self._compute_parts([(piece.row, piece.start, piece.stop) for piece in examined])
        by_document: dict[tuple[str, int], list[tuple[Piece, PartSums]]] = {}
        for piece, part in zip(examined, sums, strict=True):
            by_document.setdefault((piece.set, piece.document), []).append((piece, part))
        ranked = sorted(
            by_document.values(), key=lambda parts: _largest_first(sum(_norm(part, tokens) for _, part in parts))
        )
        documents = [self._document(parts, tokens) for parts in ranked[: self._top_k]]
        return sorted(documents, key=lambda document: -_largest_first(document.without.grad_norm))

    def _document(self, parts: Sequence[tuple[Piece, PartSums]], tokens: float) -> DocumentNorm:
        first = parts[0][0]
        weight = sum(part.weight for _, part in parts)
        return DocumentNorm(
            first.set,
            first.document,
            first.where,
            sorted(piece.row for piece, _ in parts),
            _ratio(sum(part.loss for _, part in parts), weight),
            weight,
            sum(_norm(part, tokens) for _, part in parts),
            self._measure(self._without({(first.set, first.document)})),
        )

    def _token_norms(self, document: tuple[str, int], losses_BS: np.ndarray, tokens: float) -> list[TokenNorm]:
        weights_BS = np.zeros_like(self._weights_BS)
        for piece in self._pieces():
            if (piece.set, piece.document) == document:
                span = slice(piece.start, piece.stop)
                weights_BS[piece.row, span] = self._weights_BS[piece.row, span]
        batch, tokenizer = self._batch._replace(weights=weights_BS), self._rerun.run.data.tokenizer
        hardest = find_hardest_tokens(losses_BS, batch, tokenizer, self._top_k)
        sums = self._compute_parts([(token.row, token.position, token.position + 1) for token in hardest])
        norms = [TokenNorm(token, _norm(part, tokens)) for token, part in zip(hardest, sums, strict=True)]
        return sorted(norms, key=lambda norm: _largest_first(norm.norm))


def _largest_first(value: float) -> float:
    """Returns a sorting key that puts values that are not finite first, then the largest."""
    return -value if math.isfinite(value) else -math.inf


def _norm(part: PartSums, tokens: float) -> float:
    return _ratio(math.sqrt(part.squares) if part.squares >= 0 else math.nan, tokens)


def _ratio(total: float, weight: float) -> float:
    return total / weight if weight else 0.0


def _usual_size(record: RunRecord, step: int) -> StepSize | None:
    """Returns the medians of the recorded steps before a step."""
    names = ("train/loss", "optim/grad_norm", "data/loss_tokens")
    lines = [
        [line.get(name, math.nan) for name in names]
        for number, line in record.computed.items()
        if step - _BASELINE_STEPS <= number < step
    ]
    lines = [line for line in lines if all(map(math.isfinite, line))]
    return StepSize(*map(statistics.median, zip(*lines, strict=True))) if lines else None
