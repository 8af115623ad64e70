"""Progress of a build, and the callbacks that are told of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.sources import Shard


class BuildProgress(NamedTuple):
    """State of a build: how much text is done, how fast, and the time left."""

    name: str
    """The thing that is built: `tokenizer`, `train` or `validation`."""
    done_bytes: int
    """Text tokenised so far, that of earlier runs included."""
    total_bytes: int | None
    """None where only reading tells how much text there is (compressed files)."""
    tokens: int
    share: float = 0.0
    """The share of the whole that is done; of compressed files only those count that are done."""
    rate: float = 0.0
    """Text bytes per second since this attempt began."""
    seconds_left: float | None = None

    def __str__(self) -> str:
        if self.name == "tokenizer":
            return "training the tokenizer"
        return f"tokenising the {self.name} text: {self.figures}"

    @property
    def figures(self) -> str:
        """Text done, rate and time left, for a person."""
        of_total = "" if self.total_bytes is None else f" of {self.total_bytes / 1e6:.1f}"
        pace = f", {self.rate / 1e6:.1f} MB/s" if self.rate else ""
        left = f", {self.seconds_left:.0f} s left" if self.seconds_left else ""
        return f"{self.done_bytes / 1e6:.1f}{of_total} MB, {self.tokens:,} tokens{pace}{left}"


OnProgress = Callable[[BuildProgress], None]


class Stopped(Exception):
    """The build was asked to stop; all that is committed stays."""


@dataclass(frozen=True)
class BuildCallbacks:
    """Functions that a build calls several times a second, whichever process builds."""

    on_progress: OnProgress | None = None
    on_ledger: Callable[[Ledger], None] | None = None
    """Given the ledger as it is; it goes on changing afterwards."""
    stopped: Callable[[], bool] = field(default=lambda: False)
    """Asked whether to stop; True ends the build by `Stopped`."""


class ProgressMeter:
    """Measures how far a build is, and how fast it goes since the first measurement."""

    def __init__(self, name: str, shards: Sequence[Shard]):
        self._name, self._shards = name, shards
        self._begun: tuple[float, int, float] | None = None
        """Time, bytes done and share done at the first measurement."""

    def measure(self, ledger: Ledger, uncommitted: int) -> BuildProgress:
        """Returns the progress.

        Args:
            ledger: the parts that are there.
            uncommitted: text bytes that are encoded, but not yet in a part.
        """
        total = self._total_bytes()
        done = sum(ledger.text_bytes) + uncommitted
        # Never past the end: a character that was replaced may take more bytes than it did in the source.
        done = done if total is None else min(done, total)
        share = done / total if total else self._share_of_stored(ledger)
        now = time.monotonic()
        if self._begun is None:
            self._begun = (now, done, share)
        began, done_before, share_before = self._begun
        seconds, gained = now - began, share - share_before
        left = seconds / gained * (1 - share) if gained > 0 else None
        rate = (done - done_before) / seconds if seconds > 0 else 0.0
        return BuildProgress(self._name, done, total, ledger.num_tokens, share, rate, left)

    def _total_bytes(self) -> int | None:
        sizes = [shard.text_size for shard in self._shards]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def _share_of_stored(self, ledger: Ledger) -> float:
        """Returns the share of stored bytes whose shards are read to their end, for text of unknown size."""
        stored = sum(shard.size for shard in self._shards)
        read = sum(shard.size for shard in self._shards[: ledger.next[0]])
        return read / stored if stored else 0.0
