"""Build of a cache: claims it, shares its shards among processes and keeps the ledger.

A build may be killed any number of times: the next one goes on where it was, and the bytes are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.core.runtime import available_cores
from lm_trainer.data.cache.format import PART_BYTES, shard_key
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.formats import FormatConfig, TextFormat
from lm_trainer.data.sources import Shard
from lm_trainer.data.tokenize.lock import BuilderLock
from lm_trainer.data.tokenize.manifest import check_manifest, claim, make_manifest
from lm_trainer.data.tokenize.process_pool import run_in_processes
from lm_trainer.data.tokenize.progress import BuildCallbacks, ProgressMeter, Stopped
from lm_trainer.data.tokenize.ray_backend import run_on_ray
from lm_trainer.data.tokenize.ray_config import RayConfig
from lm_trainer.data.tokenize.shard_reader import ShardJob
from lm_trainer.data.tokenize.shard_writer import write_shard
from lm_trainer.data.tokenizer import Tokenizer

PARALLEL_BYTES = 64 << 20
"""Stored bytes below which starting processes costs more than it gains: the tokenizer has threads of its own."""

BACKGROUND_PARALLEL_BYTES = 16 << 20
"""The same for a build in the background, where work in Python would hold up the other threads of this process."""

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build; none of them changes a byte of the result but `part_bytes`, which the manifest holds."""

    num_workers: int | None = None
    """Processes; 0 = this process, None = by the size of the source and the number of cores."""
    raise_on_bad_row: bool = True
    max_bad_rows: float = 0.01
    part_bytes: tuple[int, int] = PART_BYTES
    ray: RayConfig | None = None
    """A cluster to build on, in place of processes of this machine."""


@dataclass(frozen=True)
class Build:
    """A cache to be built or found finished."""

    name: str
    store: KvStore
    shards: Sequence[Shard]
    tokenizer: Tokenizer
    options: BuildOptions = field(default_factory=BuildOptions)
    format: FormatConfig = field(default_factory=TextFormat)
    on_begin: Callable[[], None] = field(default=lambda: None)
    """Called once the cache is known to be this one's to build."""

    def run(self, callbacks: BuildCallbacks | None = None, *, background_builds: int = 0) -> Ledger:
        """Builds all that is missing and returns the finished ledger.

        Args:
            callbacks: told how far the build is.
            background_builds: number of builds that share this machine beside other work of this process; 0: this
                one has both to itself.

        Raises:
            UserError: if the directory holds another cache, rows are bad, a file is damaged, or there is no text.
            MachineError: if the disk is full or a worker was killed.
            Stopped: if `callbacks.stopped` said so.
        """
        ledger = self.look()
        if not ledger.finished:
            reporter = _Reporter(self, callbacks or BuildCallbacks())
            with BuilderLock(self.store, on_wait=reporter.report) as lock:
                ledger = self._build(lock, reporter, background_builds)
            self.check_bad_rows(ledger)
        return ledger

    def look(self) -> Ledger:
        """Returns the ledger as it is; builds nothing.

        Raises:
            UserError: if the directory holds another cache, or a finished one with more bad rows than are accepted.
        """
        ledger = Ledger.read(self.store)
        check_manifest(self.store, self.manifest(), ledger)
        if ledger.finished:
            self.check_bad_rows(ledger)
        return ledger

    def manifest(self) -> dict[str, Any]:
        """Returns everything that decides the bytes of the cache."""
        return make_manifest(self.shards, self.tokenizer, self.options.part_bytes, self.format)

    def _build(self, lock: BuilderLock, reporter: _Reporter, background_builds: int) -> Ledger:
        # Read again: another builder may have finished while this one waited for the lock.
        ledger = Ledger.read(self.store)
        claim(self.store, self.manifest(), ledger)
        if ledger.finished:
            return ledger
        self.on_begin()
        keeper = _LedgerKeeper(self, ledger, lock, reporter)
        keeper.tick(force=True)
        todo = [index for index in range(len(self.shards)) if self.store.read(shard_key(index)) is None]
        jobs = [self._job(index) for index in todo]
        workers = count_workers(self.options.num_workers, [self.shards[index] for index in todo], background_builds)
        if self.options.ray is not None and jobs:
            run_on_ray(jobs, self.options.ray, keeper.tick)
        elif workers:
            run_in_processes(jobs, workers, keeper.tick)
        else:
            for job in jobs:
                write_shard(job, on_rows=keeper.add, stopped=reporter.stopped)
        return keeper.finish()

    def _job(self, index: int) -> ShardJob:
        options = self.options
        return ShardJob(
            self.store,
            index,
            self.shards[index],
            self.tokenizer,
            options.part_bytes,
            options.raise_on_bad_row,
            self.format,
        )

    def check_bad_rows(self, ledger: Ledger) -> None:
        """Refuses a cache with more bad rows than the options accept.

        Raises:
            UserError: naming the first bad rows.
        """
        if not ledger.bad:
            return
        examples = "\n".join(f"  {example}" for example in ledger.bad_examples[:3])
        if self.options.raise_on_bad_row:
            raise UserError(
                f"{self.store.url} was built with data.on_bad_row: skip and leaves out {ledger.bad} bad rows:\n"
                f"{examples}\nSet data.on_bad_row: skip to accept that, or repair the rows and remove the directory"
            )
        if ledger.bad > self.options.max_bad_rows * ledger.rows:
            raise UserError(
                f"{ledger.bad} of {ledger.rows} rows of the {self.name} data are bad, more than data.max_bad_rows "
                f"({self.options.max_bad_rows:g}) allows:\n{examples}"
            )


def count_workers(wanted: int | None, shards: Sequence[Shard], background_builds: int) -> int:
    """Returns the number of processes for some shards; 0 = this process.

    Args:
        wanted: the number that the configuration names, if it does.
        shards: the shards that are still to be built.
        background_builds: as `Build.run` takes it.
    """
    if wanted is None:
        least = BACKGROUND_PARALLEL_BYTES if background_builds else PARALLEL_BYTES
        # In the background even one shard is worth a process, which leaves this one's interpreter lock alone.
        if (len(shards) < 2 and not background_builds) or sum(shard.size for shard in shards) < least:
            return 0
        wanted = available_cores()
    return min(max(1, wanted // max(background_builds, 1)) if wanted else 0, len(shards))


class _Reporter:
    """Tells the callbacks of a build how far it is, whether this process builds or waits for another."""

    def __init__(self, build: Build, callbacks: BuildCallbacks):
        self._store, self._callbacks = build.store, callbacks
        self._meter = ProgressMeter(build.name, build.shards)
        self.stopped = callbacks.stopped

    def report(self, ledger: Ledger | None = None, uncommitted: int = 0) -> None:
        """Calls the callbacks.

        Args:
            ledger: if None, read from the store, where another process keeps it.
            uncommitted: text bytes that are encoded, but not yet in a part.

        Raises:
            Stopped: if the build is to end.
        """
        on_progress, on_ledger = self._callbacks.on_progress, self._callbacks.on_ledger
        if self.stopped():
            raise Stopped
        if on_progress is None and on_ledger is None:
            return
        ledger = ledger or Ledger.read(self._store)
        if on_ledger is not None:
            on_ledger(ledger)
        if on_progress is not None:
            on_progress(self._meter.measure(ledger, uncommitted))


class _LedgerKeeper:
    """Keeps ledger, heartbeat and progress up to date while shards are written."""

    def __init__(self, build: Build, ledger: Ledger, lock: BuilderLock, reporter: _Reporter):
        self._build, self._ledger, self._lock, self._reporter = build, ledger, lock, reporter
        self._uncommitted, self._last_tick = 0, 0.0

    def add(self, text_bytes: int) -> None:
        """Counts text that was encoded in this process."""
        self._uncommitted += text_bytes
        self.tick()

    def tick(self, *, force: bool = False) -> None:
        """Takes in all that was committed since, if the last time is long enough ago.

        Raises:
            Stopped: if the build is to end.
        """
        now = time.monotonic()
        if not force and now - self._last_tick < POLL_SECONDS:
            return
        self._last_tick = now
        self._lock.beat()
        before = sum(self._ledger.text_bytes)
        if self._ledger.advance(self._build.store, len(self._build.shards)):
            self._ledger.write(self._build.store)
            self._uncommitted = max(0, self._uncommitted - (sum(self._ledger.text_bytes) - before))
        self._reporter.report(self._ledger, self._uncommitted)

    def finish(self) -> Ledger:
        """Writes the ledger as finished, once every shard is.

        Raises:
            UserError: if there is no text, or there are too many bad rows.
        """
        self.tick(force=True)
        if self._ledger.num_documents == 0:
            raise UserError(
                f"the {self._build.name} data holds no text: {self._ledger.rows} rows, all of them empty or bad"
            )
        self._build.check_bad_rows(self._ledger)
        self._ledger.finished = True
        self._ledger.write(self._build.store)
        return self._ledger
