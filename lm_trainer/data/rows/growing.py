"""Caches that are built while a run reads what is there already.

What a row number means never depends on how much is cached: a reader waits until that is certain.

Shape letters: N positions.
"""

from __future__ import annotations

import concurrent.futures.process
import concurrent.futures.thread  # noqa: F401 - see _ending
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.data.cache.format import Ledger
from lm_trainer.data.cache.kvstore import Store
from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.rows.order import TrainOrder
from lm_trainer.data.sources import Shard
from lm_trainer.data.tokenize.build import Build, BuildProgress
from lm_trainer.data.tokenize.shard_writer import Stopped

POLL_SECONDS, _JOIN_SECONDS = 0.05, 15.0

_ending = threading.Event()
"""Set when the interpreter ends."""

# Before it runs what `atexit` knows, Python waits for the threads of executors, and so for what they wait for. This is
# the way in which the executors themselves are told; the last to register is told first, hence their imports above.
threading._register_atexit(_ending.set)  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(eq=False)
class OpenSet:
    """One split of one set, as it stands in its cache."""

    store: Store
    stream: TokenStream
    ledger: Ledger
    shards: tuple[Shard, ...]
    identity: str = ""
    """Differs whenever the tokens may, and is known before they are: the hash of what the cache is made of."""
    build: BackgroundBuild | None = None
    """Who builds it meanwhile, if it was not finished when it was opened."""

    @property
    def finished(self) -> bool:
        return self.ledger.finished

    def take(self, ledger: Ledger) -> None:
        """Takes in what has been committed since; the ledger may go on changing."""
        if len(ledger.parts) > len(self.ledger.parts) or ledger.finished:
            snapshot = ledger.copy()
            # The tokens first: whoever sees a finished ledger may ask how many there are.
            self.stream.extend(snapshot)
            self.ledger = snapshot

    def check(self) -> None:
        """Raises what ended the build before it was done, if anything did."""
        if self.build is not None:
            self.build.check()

    def missing(self, have: int, need: int | None) -> Missing:
        """What a reader waits for who needs so many tokens, or all."""
        return Missing(have, need, None if self.build is None else self.build.progress)


class Missing(NamedTuple):
    """Tokens that a reader waits for."""

    have: int
    need: int | None
    """None = all that there will be."""
    progress: BuildProgress | None
    """Of the cache that is to hold them."""

    def __str__(self) -> str:
        if self.need is not None:
            return f"waiting for tokenised data ({self.have:,} of {self.need:,} tokens)"
        figures = f" ({self.progress.name}: {self.progress.figures})" if self.progress else ""
        return f"waiting for tokenised data{figures}"


class BackgroundBuild:
    """Builds a cache in a thread of this process and its workers, or waits while another process does.

    It ends with the process, whether or not it is closed; what was built is kept.
    """

    def __init__(self, build: Build, cache: OpenSet):
        self._build, self._cache = build, cache
        self.progress: BuildProgress | None = None
        """The newest."""
        self._error: BaseException | None = None
        self._closed = threading.Event()
        build.on_progress, build.on_ledger, build.stopped = self._show, cache.take, self._stopped
        cache.build = self

    def run(self) -> None:
        """Builds to the end, to the first failure, or until it is closed."""
        try:
            self._cache.take(self._build.run())
        except Stopped:
            self._error = RuntimeError(f"the build of {self._cache.store.url} has been closed")
        except BaseException as error:  # given to whoever needs what is not there
            self._error = error

    def check(self) -> None:
        """Raises what ended the build, if it has failed."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._closed.set()

    def _show(self, progress: BuildProgress) -> None:
        self.progress = progress

    def _stopped(self) -> bool:
        return self._closed.is_set() or _ending.is_set()


class Builders:
    """The threads that build caches."""

    def __init__(self, builds: Sequence[BackgroundBuild], *, one_by_one: bool):
        self._builds = builds
        work = [self._run_all] if one_by_one else [build.run for build in builds]
        # No daemons: Python would end those amid the C++ of TensorStore, which ends the process by SIGABRT.
        self._threads = [threading.Thread(target=run, name="tokenise") for run in work]
        for thread in self._threads:
            thread.start()

    def _run_all(self) -> None:
        for build in self._builds:
            build.run()

    def close(self) -> None:
        """Ends them and their workers after the batch of rows at hand; safe to call twice."""
        for build in self._builds:
            build.close()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)


class GrowingOrder:
    """The order of training over sets of which some may still be growing.

    Args:
        look: the order, as far as it is certain now.
        caches: those of the sets, by their names.
        whole: whether every set must be complete before the first row, since their ends decide the length.
        closed: ends all waiting.
    """

    def __init__(
        self,
        look: Callable[[], TrainOrder],
        caches: dict[str, OpenSet],
        *,
        whole: bool = False,
        closed: threading.Event,
    ):
        self._look, self._caches, self._whole, self._closed = look, caches, whole, closed
        self._order: TrainOrder | None = None

    @property
    def growing(self) -> bool:
        """Whether some set was still growing when it was last looked at."""
        return self._order is None or not all(train.final for train in self._order.sets)

    def missing(self, positions_N: np.ndarray) -> Missing | None:
        """What has to be there before the rows at these positions are certain; None if they are.

        Raises:
            UserError: if that will not come, because its build failed.
        """
        if self._order is None or self._order.unsettled(positions_N, whole=self._whole):
            self._order = self._look()
        if (lacking := self._order.unsettled(positions_N, whole=self._whole)) is None:
            return None
        train, rows = lacking
        cache, seq_len = self._caches[train.name], train.rows.seq_len
        cache.check()
        return cache.missing(train.num_rows * seq_len, None if rows is None else rows * seq_len)

    def read(self, positions_N: np.ndarray) -> Batch:
        """The rows at some positions, as soon as they are certain.

        Raises:
            UserError: as `missing` does.
        """
        while self.missing(positions_N) is not None:
            if self._closed.wait(POLL_SECONDS) or _ending.is_set():
                raise RuntimeError("the iterator of batches has been closed")
        assert self._order is not None
        return self._order.read(positions_N)
