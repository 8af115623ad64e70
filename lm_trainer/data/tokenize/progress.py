"""The progress of a build, and callbacks that report it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.sources import Shard


class BuildProgress(NamedTuple):
    """State of a build: how much text is tokenised, the speed, and the time left."""

    name: str
    """Name of the object that is being built: `tokenizer`, `train` or `validation`."""
    done_bytes: int
    """Number of bytes of text tokenised so far, including by earlier runs."""
    total_bytes: int | None
    """Number of bytes of the full text; None if it is unknown until the text is read (compressed files)."""
    tokens: int
    share: float = 0.0
    """Fraction of the work done so far; compressed files count only once they are complete."""
    rate: float = 0.0
    """Number of text bytes per second since this attempt began."""
    seconds_left: float | None = None

    def __str__(self) -> str:
        if self.name == "tokenizer":
            return "training the tokenizer"
        return f"tokenising the {self.name} text: {self.figures}"

    @property
    def figures(self) -> str:
        """The amount of text done, the rate and the time left, formatted for people."""
        of_total = "" if self.total_bytes is None else f" of {self.total_bytes / 1e6:.1f}"
        pace = f", {self.rate / 1e6:.1f} MB/s" if self.rate else ""
        left = f", {self.seconds_left:.0f} s left" if self.seconds_left else ""
        return f"{self.done_bytes / 1e6:.1f}{of_total} MB, {self.tokens:,} tokens{pace}{left}"


OnProgress = Callable[[BuildProgress], None]


class Stopped(Exception):
    """The build was asked to stop. Committed parts are kept."""


@dataclass(frozen=True)
class BuildCallbacks:
    """Functions called several times a second during a build, even while another process does the building."""

    on_progress: OnProgress | None = None
    on_ledger: Callable[[Ledger], None] | None = None
    """Receives the current ledger, which keeps changing afterwards."""
    stopped: Callable[[], bool] = field(default=lambda: False)
    """Returns True to end the build with `Stopped`."""


class ProgressMeter:
    """Measures the progress of a build, and its speed since the first measurement."""

    def __init__(self, name: str, shards: Sequence[Shard]):
        self._name, self._shards = name, shards
        self._begun: tuple[float, int, float] | None = None
        """Time, number of bytes done and fraction done at the first measurement."""

    def measure(self, ledger: Ledger, uncommitted: int) -> BuildProgress:
        """Returns the progress.

        Args:
            ledger: the parts built so far.
            uncommitted: number of text bytes that are encoded but not yet committed in a part.
        """
        total = self._total_bytes()
        done = sum(ledger.text_bytes) + uncommitted
        # Capped at the total, because a replaced character may take more bytes than it does in the source.
        done = done if total is None else min(done, total)
        share = done / total if total else self._completed_share(ledger)
        current_time = time.monotonic()
        if self._begun is None:
            self._begun = (current_time, done, share)
        began, done_before, share_before = self._begun
        seconds, gained = current_time - began, share - share_before
        left = seconds / gained * (1 - share) if gained > 0 else None
        rate = (done - done_before) / seconds if seconds > 0 else 0.0
        return BuildProgress(self._name, done, total, ledger.num_tokens, share, rate, left)

    def _total_bytes(self) -> int | None:
        sizes = [shard.text_size for shard in self._shards]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def _completed_share(self, ledger: Ledger) -> float:
        """Returns the fraction of stored bytes that are in completed shards.

        Used when the size of the text is unknown.
        """
        stored = sum(shard.size for shard in self._shards)
        read = sum(shard.size for shard in self._shards[: ledger.next[0]])
        return read / stored if stored else 0.0
