"""Builds a cache: claims it, distributes its shards over processes and maintains the ledger.

A build may be killed at any time. The next one resumes where it stopped, and produces the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lm_trainer.core.errors import UserError
from lm_trainer.core.runtime import available_cores
from lm_trainer.data.cache.format import PART_BYTES, shard_key
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.formats import FormatConfig, TextFormat
from lm_trainer.data.sources import Shard
from lm_trainer.data.tokenize.lock import BuilderLock
from lm_trainer.data.tokenize.manifest import Manifest, claim_store, count_matching_shards, make_manifest
from lm_trainer.data.tokenize.process_pool import run_in_processes
from lm_trainer.data.tokenize.progress import BuildCallbacks, ProgressMeter, Stopped
from lm_trainer.data.tokenize.ray_backend import run_on_ray
from lm_trainer.data.tokenize.ray_config import RayConfig
from lm_trainer.data.tokenize.shard_reader import ShardJob
from lm_trainer.data.tokenize.shard_writer import write_shard
from lm_trainer.data.tokenizer import Tokenizer

PARALLEL_BYTES = 64 << 20
"""Number of stored bytes below which starting processes costs more than it gains, as the tokenizer is already
multi-threaded."""

BACKGROUND_PARALLEL_BYTES = 16 << 20
"""As `PARALLEL_BYTES`, for a background build, whose Python code would hold up the other threads of this process."""

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build. Only `part_bytes`, which the manifest records, affects the bytes of the result."""

    num_workers: int | None = None
    """Number of worker processes; 0 = this process, None = chosen from the source size and the number of cores."""
    raise_on_bad_row: bool = True
    max_bad_rows: float = 0.01
    part_bytes: tuple[int, int] = PART_BYTES
    ray: RayConfig | None = None
    """The Ray cluster to build on; None means processes on this machine."""


@dataclass(frozen=True)
class Build:
    """A cache to build, unless it is finished already."""

    name: str
    store: KvStore
    shards: Sequence[Shard]
    tokenizer: Tokenizer
    options: BuildOptions = field(default_factory=BuildOptions)
    format: FormatConfig = field(default_factory=TextFormat)
    on_begin: Callable[[], None] = field(default=lambda: None)
    """Called once this build has claimed the cache."""

    def run(self, callbacks: BuildCallbacks | None = None, *, background_builds: int = 0) -> Ledger:
        """Builds the missing parts and returns the finished ledger.

        Args:
            callbacks: functions that report progress and can stop the build.
            background_builds: number of builds that share this machine with other work of this process; 0 means that
                this build has the machine and the process to itself.

        Raises:
            UserError: if the directory holds another cache, too many rows are bad, a file is damaged, or the data has
                no text.
            MachineError: if the disk is full or a worker was killed.
            Stopped: if `callbacks.stopped` returned True.
        """
        ledger = self.read_ledger()
        if not ledger.finished:
            reporter = _Reporter(self, callbacks or BuildCallbacks())
            with BuilderLock(self.store, on_wait=reporter.report) as lock:
                ledger = self._build(lock, reporter, background_builds)
            self.check_bad_rows(ledger)
        return ledger

    def read_ledger(self) -> Ledger:
        """Returns the current ledger without building.

        Raises:
            UserError: if the directory holds another cache, or a finished cache with too many bad rows.
        """
        ledger = Ledger.read(self.store)
        count_matching_shards(self.store, self.manifest(), ledger)
        if ledger.finished:
            self.check_bad_rows(ledger)
        return ledger

    def manifest(self) -> Manifest:
        """Returns everything that determines the bytes of the cache."""
        return make_manifest(self.shards, self.tokenizer, self.options.part_bytes, self.format)

    def _build(self, lock: BuilderLock, reporter: _Reporter, background_builds: int) -> Ledger:
        # Rereads the ledger, because another builder may have finished while this one waited for the lock.
        ledger = Ledger.read(self.store)
        claim_store(self.store, self.manifest(), ledger)
        if ledger.finished:
            return ledger
        self.on_begin()
        keeper = _LedgerKeeper(self, ledger, lock, reporter)
        keeper.update(force=True)
        todo = [index for index in range(len(self.shards)) if self.store.read(shard_key(index)) is None]
        jobs = [self._make_job(index) for index in todo]
        workers = count_workers(self.options.num_workers, [self.shards[index] for index in todo], background_builds)
        if self.options.ray is not None and jobs:
            run_on_ray(jobs, self.options.ray, keeper.update)
        elif workers:
            run_in_processes(jobs, workers, keeper.update)
        else:
            for job in jobs:
                write_shard(job, on_rows=keeper.add_uncommitted, stopped=reporter.stopped)
        return keeper.finish()

    def _make_job(self, index: int) -> ShardJob:
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
        """Rejects a cache with more bad rows than the options allow.

        Raises:
            UserError: if there are too many; names the first ones.
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


def count_workers(num_workers: int | None, shards: Sequence[Shard], background_builds: int) -> int:
    """Returns the number of worker processes for building shards; 0 = this process.

    Args:
        num_workers: the configured number, or None to choose one.
        shards: the shards still to be built.
        background_builds: see `Build.run`.
    """
    if num_workers is None:
        least = BACKGROUND_PARALLEL_BYTES if background_builds else PARALLEL_BYTES
        # In the background, even one shard is worth a process, since it does not compete for the interpreter lock.
        if (len(shards) < 2 and not background_builds) or sum(shard.size for shard in shards) < least:
            return 0
        num_workers = available_cores()
    return min(max(1, num_workers // max(background_builds, 1)) if num_workers else 0, len(shards))


class _Reporter:
    """Reports progress to the callbacks of a build, both while this process builds and while it waits for another."""

    def __init__(self, build: Build, callbacks: BuildCallbacks):
        self._store, self._callbacks = build.store, callbacks
        self._meter = ProgressMeter(build.name, build.shards)
        self.stopped = callbacks.stopped

    def report(self, ledger: Ledger | None = None, uncommitted: int = 0) -> None:
        """Calls the callbacks.

        Args:
            ledger: the current ledger; None reads it from the store, where another process updates it.
            uncommitted: number of text bytes that are encoded but not yet committed in a part.

        Raises:
            Stopped: if the build was asked to stop.
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
    """Keeps the ledger, the heartbeat and the progress up to date while shards are written."""

    def __init__(self, build: Build, ledger: Ledger, lock: BuilderLock, reporter: _Reporter):
        self._build, self._ledger, self._lock, self._reporter = build, ledger, lock, reporter
        self._uncommitted, self._last_tick = 0, 0.0

    def add_uncommitted(self, text_bytes: int) -> None:
        """Adds the size of text encoded in this process."""
        self._uncommitted += text_bytes
        self.update()

    def update(self, *, force: bool = False) -> None:
        """Adds newly committed parts to the ledger and reports progress, at most once per POLL_SECONDS unless `force`.

        Raises:
            Stopped: if the build was asked to stop.
        """
        current_time = time.monotonic()
        if not force and current_time - self._last_tick < POLL_SECONDS:
            return
        self._last_tick = current_time
        self._lock.write_heartbeat()
        bytes_before = sum(self._ledger.text_bytes)
        if self._ledger.advance(self._build.store, len(self._build.shards)):
            self._ledger.write(self._build.store)
            self._uncommitted = max(0, self._uncommitted - (sum(self._ledger.text_bytes) - bytes_before))
        self._reporter.report(self._ledger, self._uncommitted)

    def finish(self) -> Ledger:
        """Marks the ledger as finished after the last shard, and writes it.

        Raises:
            UserError: if the data has no text, or has too many bad rows.
        """
        self.update(force=True)
        if self._ledger.num_documents == 0:
            raise UserError(
                f"the {self._build.name} data holds no text: {self._ledger.rows} rows, all of them empty or bad"
            )
        self._build.check_bad_rows(self._ledger)
        self._ledger.finished = True
        self._ledger.write(self._build.store)
        return self._ledger
