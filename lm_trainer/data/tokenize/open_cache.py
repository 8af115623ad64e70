"""A cache opened for reading: one split of one set, which may still be under construction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lm_trainer.data.cache.documents import document_lengths
from lm_trainer.data.cache.exclusion import Exclusion, read_exclusions
from lm_trainer.data.cache.filtered_stream import FilteredStream
from lm_trainer.data.cache.format import fingerprint, token_dtype
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.cache.loss_mask import LossMaskStream
from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.config import DataConfig
from lm_trainer.data.sources import Shard
from lm_trainer.data.sources.tokens import TokenShard
from lm_trainer.data.tokenize.build import Build
from lm_trainer.data.tokenize.finished_cache import FinishedCache
from lm_trainer.data.tokenize.progress import BuildProgress
from lm_trainer.data.tokenize.ready_rows import ReadyRows


class MissingTokens(NamedTuple):
    """The tokens that a reader is waiting for."""

    have: int
    need: int | None
    """Number of tokens needed; None = all tokens of the finished cache."""
    progress: BuildProgress | None
    """Progress of the cache that will hold the tokens."""

    def __str__(self) -> str:
        if self.need is not None:
            return f"waiting for tokenised data ({self.have:,} of {self.need:,} tokens)"
        figures = f" ({self.progress.name}: {self.progress.figures})" if self.progress else ""
        return f"waiting for tokenised data{figures}"


@dataclass(eq=False)
class OpenCache:
    """One split of one set, read from its cache.

    Readers use it from any thread. Only the thread that builds the cache calls `extend`, `set_progress` and
    `set_error`.
    """

    store: KvStore
    stream: TokenStream
    """The documents to read, which are all except the excluded documents."""
    ledger: Ledger
    shards: Sequence[Shard]
    identity: str = ""
    """Hash of the manifest. It changes whenever the tokens may change, and is known before they are built."""
    exclusion: Exclusion | None = None
    """The excluded documents."""
    _progress: BuildProgress | None = field(default=None, init=False)
    _error: BaseException | None = field(default=None, init=False)

    @property
    def finished(self) -> bool:
        """True once all text is tokenised."""
        return self.ledger.finished

    @property
    def whole(self) -> TokenStream:
        """The stream of all documents, including excluded ones."""
        return self.stream.whole if isinstance(self.stream, FilteredStream) else self.stream

    def limit_ids(self, count: int) -> None:
        """Makes reads fail for ids of `count` or more, which have no row in the model's embedding."""
        self.whole.num_model_ids = count

    def document_lengths(self) -> np.ndarray:
        """Number of tokens of each document of `stream`, including the end-of-document token: int64 [D]."""
        if isinstance(self.stream, FilteredStream):
            return self.stream.lengths_D
        return document_lengths(self.store, self.ledger)

    def to_unfiltered(self, start: int, count: int) -> list[tuple[int, int]]:
        """Maps the tokens [start, start + count) of `stream` to runs (first token, number of tokens) of `whole`."""
        if not isinstance(self.stream, FilteredStream):
            return [(start, count)]
        _, starts_P, counts_P, _ = self.stream.map_to_full_stream(np.array([start]), np.array([count]))
        return list(zip(starts_P.tolist(), counts_P.tolist(), strict=True))

    def position_of(self, token: int) -> int | None:
        """Returns the position in `stream` of a token of `whole`; None if its document is excluded."""
        return self.stream.position_of(token) if isinstance(self.stream, FilteredStream) else token

    def extend(self, ledger: Ledger) -> None:
        """Adds newly committed parts. The ledger is copied, so the caller may continue to change it."""
        if len(ledger.parts) > len(self.ledger.parts) or ledger.finished:
            snapshot = ledger.copy()
            # The stream is extended first, because a reader that sees a finished ledger may ask for its length.
            self.stream.extend(snapshot)
            self.ledger = snapshot

    def set_progress(self, progress: BuildProgress) -> None:
        """Stores the latest progress, which waiting readers report."""
        self._progress = progress

    def set_error(self, error: BaseException) -> None:
        """Stores the error that ended the build, which is raised in readers of the missing text."""
        self._error = error

    def raise_if_failed(self) -> None:
        """Raises the error that ended the build, if one did."""
        if self._error is not None:
            raise self._error

    def missing_tokens(self, need: int | None, have: int | None = None) -> MissingTokens:
        """Describes the tokens that a reader waits for.

        Args:
            need: number of tokens that the reader needs; None = all tokens of the finished cache.
            have: number of tokens that the reader can use so far; None = all tokens built so far.
        """
        return MissingTokens(len(self.stream) if have is None else have, need, self._progress)


def read_excluded_documents(config: DataConfig) -> dict[str, Exclusion]:
    """Returns the documents that a configuration excludes, keyed by `NAME/train`.

    Raises:
        UserError: if a list cannot be read.
    """
    return {f"{name}/train": exclusion for name, exclusion in read_exclusions(config.exclude, config.trained).items()}


def open_cache(
    build: Build | FinishedCache | ReadyRows, ledger: Ledger, exclusion: Exclusion | None = None, name: str = ""
) -> OpenCache:
    """Opens the cache of a build with the parts in the ledger.

    Args:
        build: the build of the cache.
        ledger: the parts built so far.
        exclusion: documents to exclude.
        name: name of the set, for messages about excluded documents.

    Raises:
        UserError: if the excluded documents belong to other data.
    """
    stream = TokenStream(build.store, ledger, token_dtype(build.tokenizer.vocab_size))
    # Before the first part is written, the ledger does not show whether the cache has a loss mask. For a cache built
    # elsewhere, the format never shows it.
    by_index = any(isinstance(shard, TokenShard) and shard.by_index for shard in build.shards)
    if ledger.marks or build.format.has_loss_mask or by_index:
        stream.loss_mask = LossMaskStream(build.store, ledger, np.dtype(np.uint8))
    if exclusion is not None:
        stream = FilteredStream(build.store, ledger, stream, exclusion, name)
    return OpenCache(build.store, stream, ledger, build.shards, fingerprint(build.manifest()), exclusion)
