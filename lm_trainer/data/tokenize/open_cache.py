"""Open cache: one split of one set, which may still be built while it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lm_trainer.data.cache.format import fingerprint, token_dtype
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.cache.loss_mask import LossMaskStream
from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.sources import Shard
from lm_trainer.data.sources.tokens import TokenShard
from lm_trainer.data.tokenize.build import Build
from lm_trainer.data.tokenize.finished_cache import FinishedCache
from lm_trainer.data.tokenize.progress import BuildProgress


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
    ledger: Ledger
    shards: Sequence[Shard]
    identity: str = ""
    """Hash of the manifest: differs whenever the tokens may, and is known before they are."""
    _progress: BuildProgress | None = field(default=None, init=False)
    _error: BaseException | None = field(default=None, init=False)

    @property
    def finished(self) -> bool:
        """True once all of the text is tokenised."""
        return self.ledger.finished

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


def open_cache(build: Build | FinishedCache, ledger: Ledger) -> OpenCache:
    """Opens the cache of a build, as far as the ledger goes."""
    stream = TokenStream(build.store, ledger, token_dtype(build.tokenizer.vocab_size))
    # The ledger of a cache without parts does not tell yet; the format of one that was built elsewhere never does.
    by_index = any(isinstance(shard, TokenShard) and shard.by_index for shard in build.shards)
    if ledger.marks or build.format.has_loss_mask or by_index:
        stream.loss_mask = LossMaskStream(build.store, ledger, np.dtype(np.uint8))
    return OpenCache(build.store, stream, ledger, build.shards, fingerprint(build.manifest()))
