"""Open cache: one split of one set, which may still be built while it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lm_trainer.data.cache.documents import document_lengths
from lm_trainer.data.cache.exclusion import Exclusion, read_exclusions
from lm_trainer.data.cache.format import fingerprint, token_dtype
from lm_trainer.data.cache.kept_stream import KeptStream
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
    """Tokens that a reader waits for."""

    have: int
    need: int | None
    """None = all that there will be."""
    progress: BuildProgress | None
    """Progress of the cache that is to hold them."""

    def __str__(self) -> str:
        if self.need is not None:
            return f"waiting for tokenised data ({self.have:,} of {self.need:,} tokens)"
        figures = f" ({self.progress.name}: {self.progress.figures})" if self.progress else ""
        return f"waiting for tokenised data{figures}"


@dataclass(eq=False)
class OpenCache:
    """One split of one set, as it stands in its cache.

    Readers use it from any thread; `extend`, `show` and `fail` are for the one thread that builds it, if any does.
    """

    store: KvStore
    stream: TokenStream
    """The documents that are read: all but those of `exclusion`."""
    ledger: Ledger
    shards: Sequence[Shard]
    identity: str = ""
    """Hash of the manifest: differs whenever the tokens may, and is known before they are."""
    exclusion: Exclusion | None = None
    """The documents that are left out."""
    _progress: BuildProgress | None = field(default=None, init=False)
    _error: BaseException | None = field(default=None, init=False)

    @property
    def finished(self) -> bool:
        """True once all of the text is tokenised."""
        return self.ledger.finished

    @property
    def whole(self) -> TokenStream:
        """The stream of all documents, also of those that are left out."""
        return self.stream.whole if isinstance(self.stream, KeptStream) else self.stream

    def limit_ids(self, count: int) -> None:
        """Refuses to read ids from `count` on, which the model has no rows for."""
        self.whole.known_ids = count

    def document_lengths(self) -> np.ndarray:
        """The tokens of each document of `stream`, end-of-document token included: int64 [D]."""
        if isinstance(self.stream, KeptStream):
            return self.stream.lengths_D
        return document_lengths(self.store, self.ledger)

    def in_whole(self, start: int, count: int) -> list[tuple[int, int]]:
        """Finds the tokens [start, start + count) of `stream` in `whole`: pairs of a first token and a number."""
        if not isinstance(self.stream, KeptStream):
            return [(start, count)]
        _, starts_P, counts_P, _ = self.stream.pieces(np.array([start]), np.array([count]))
        return list(zip(starts_P.tolist(), counts_P.tolist(), strict=True))

    def place_of(self, token: int) -> int | None:
        """The place in `stream` of a token of `whole`; None where its document is left out."""
        return self.stream.place_of(token) if isinstance(self.stream, KeptStream) else token

    def extend(self, ledger: Ledger) -> None:
        """Takes in the parts that were committed since; the caller may go on changing the ledger."""
        if len(ledger.parts) > len(self.ledger.parts) or ledger.finished:
            snapshot = ledger.copy()
            # The tokens first: whoever sees a finished ledger may ask how many there are.
            self.stream.extend(snapshot)
            self.ledger = snapshot

    def show(self, progress: BuildProgress) -> None:
        """Keeps the newest progress, for those who wait."""
        self._progress = progress

    def fail(self, error: BaseException) -> None:
        """Keeps the error that ended the build, for those who need the text that will not come."""
        self._error = error

    def check(self) -> None:
        """Raises the error that ended the build, if one did."""
        if self._error is not None:
            raise self._error

    def missing(self, need: int | None, have: int | None = None) -> MissingTokens:
        """Describes a reader's wait.

        Args:
            need: tokens that the reader needs; None = all that there will be.
            have: tokens that count for the reader; by default all that there are.
        """
        return MissingTokens(len(self.stream) if have is None else have, need, self._progress)


def excluded_of(config: DataConfig) -> dict[str, Exclusion]:
    """The documents that a configuration leaves out, by `NAME/train`.

    Raises:
        UserError: for a list that cannot be read.
    """
    return {f"{name}/train": found for name, found in read_exclusions(config.exclude, config.trained).items()}


def open_cache(
    build: Build | FinishedCache | ReadyRows, ledger: Ledger, exclusion: Exclusion | None = None, name: str = ""
) -> OpenCache:
    """Opens the cache of a build, as far as the ledger goes.

    Args:
        build: of the cache.
        ledger: as far as it is built.
        exclusion: documents that are left out.
        name: of the set, for messages about these.

    Raises:
        UserError: where the documents to be left out are those of other data.
    """
    stream = TokenStream(build.store, ledger, token_dtype(build.tokenizer.vocab_size))
    # The ledger of a cache without parts does not tell yet; the format of one that was built elsewhere never does.
    by_index = any(isinstance(shard, TokenShard) and shard.by_index for shard in build.shards)
    if ledger.marks or build.format.has_loss_mask or by_index:
        stream.loss_mask = LossMaskStream(build.store, ledger, np.dtype(np.uint8))
    if exclusion is not None:
        stream = KeptStream(build.store, ledger, stream, exclusion, name)
    return OpenCache(build.store, stream, ledger, build.shards, fingerprint(build.manifest()), exclusion)
