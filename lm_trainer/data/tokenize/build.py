"""Builds a cache: claims it, shares its shards among workers, keeps the ledger. Any number of kills changes nothing."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lm_trainer.core.errors import UserError
from lm_trainer.core.runtime import available_cores
from lm_trainer.data.cache.format import BUILDER, PART_BYTES, Ledger, check_manifest, claim, make_manifest, shard_key
from lm_trainer.data.cache.kvstore import Store
from lm_trainer.data.formats import FormatConfig, TextFormat
from lm_trainer.data.sources import Shard
from lm_trainer.data.tokenize.process_pool import run_in_processes
from lm_trainer.data.tokenize.ray_backend import RayConfig, run_on_ray
from lm_trainer.data.tokenize.shard_writer import Job, Stopped, build_shard
from lm_trainer.data.tokenizer import Tokenizer

PARALLEL_BYTES = 64 << 20
"""Below so many stored bytes, starting processes costs more than it gains: the tokenizer has threads of its own."""

BESIDE_BYTES = 16 << 20
"""The same where this process has other things to do, from which the work in Python would keep it."""

BEAT_SECONDS, DEAD_SECONDS, POLL_SECONDS = 2.0, 30.0, 0.2


class BuildProgress(NamedTuple):
    """How far a build is."""

    name: str
    """What is built: `tokenizer`, `train` or `validation`."""
    done_bytes: int
    """Text tokenised so far, that of earlier runs included."""
    total_bytes: int | None
    """None where only reading tells how much text there is (compressed files)."""
    tokens: int
    share: float = 0.0
    """Of the whole that is done; of compressed files only those count that are done."""
    rate: float = 0.0
    """Text bytes per second since this attempt began."""
    seconds_left: float | None = None

    def __str__(self) -> str:
        if self.name == "tokenizer":
            return "training the tokenizer"
        return f"tokenising the {self.name} text: {self.figures}"

    @property
    def figures(self) -> str:
        """How much of how much, how fast, and for how long still."""
        of_total = "" if self.total_bytes is None else f" of {self.total_bytes / 1e6:.1f}"
        pace = f", {self.rate / 1e6:.1f} MB/s" if self.rate else ""
        left = f", {self.seconds_left:.0f} s left" if self.seconds_left else ""
        return f"{self.done_bytes / 1e6:.1f}{of_total} MB, {self.tokens:,} tokens{pace}{left}"


OnProgress = Callable[[BuildProgress], None]


@dataclass(frozen=True)
class BuildOptions:
    """How a build goes about; none of it changes a byte of the result but `part_bytes`, which the manifest holds."""

    num_workers: int | None = None
    """Processes; 0 = this process, None = by the size of the source and the number of cores."""
    raise_on_bad_row: bool = True
    max_bad_rows: float = 0.01
    part_bytes: tuple[int, int] = PART_BYTES
    ray: RayConfig | None = None
    """A cluster to build on, in place of processes of this machine."""
    beside: int = 0
    """How many builds share this machine beside other work of this process; 0: this one has both to itself."""

    def workers(self, shards: Sequence[Shard]) -> int:
        wanted, at_once = self.num_workers, max(self.beside, 1)
        if wanted is None:
            least = BESIDE_BYTES if self.beside else PARALLEL_BYTES
            if (len(shards) < 2 and not self.beside) or sum(shard.size for shard in shards) < least:
                return 0
            wanted = available_cores()
        return min(max(1, wanted // at_once) if wanted else 0, len(shards))


@dataclass
class Build:
    """One cache to be built or found finished."""

    name: str
    store: Store
    shards: list[Shard]
    tokenizer: Tokenizer
    options: BuildOptions = field(default_factory=BuildOptions)
    on_progress: OnProgress | None = None
    format: FormatConfig = field(default_factory=TextFormat)
    on_ledger: Callable[[Ledger], None] | None = None
    """Told again and again how far the ledger is, whoever builds; it goes on changing."""
    on_begin: Callable[[], None] = field(default=lambda: None)
    """Called once the cache is known to be this one's to build."""
    stopped: Callable[[], bool] = field(default=lambda: False)
    """Asked again and again; ends the build by `Stopped`."""
    _begun: tuple[float, int, float] | None = field(default=None, init=False)
    """When this attempt first reported, and the bytes and the share that were done by then."""

    def run(self) -> Ledger:
        """Builds what is missing and returns the finished ledger.

        Raises:
            UserError: if the directory holds another cache, rows are bad, a file is damaged, or there is no text.
            MachineError: if the disk is full or a worker was killed.
            Stopped: if `stopped` said so.
        """
        ledger = self.look()
        if not ledger.finished:
            with _Lock(self.store, on_wait=self.report) as lock:
                ledger = self._build(self.manifest(), lock)
            self.check_bad_rows(ledger)
        return ledger

    def look(self) -> Ledger:
        """The ledger as it is; builds nothing.

        Raises:
            UserError: if the directory holds another cache, or a finished one with more bad rows than are accepted.
        """
        ledger = Ledger.read(self.store)
        check_manifest(self.store, self.manifest(), ledger)
        if ledger.finished:
            self.check_bad_rows(ledger)
        return ledger

    def manifest(self) -> dict[str, Any]:
        """Everything that decides the bytes of the cache."""
        return make_manifest(self.shards, self.tokenizer, self.options.part_bytes, self.format)

    def _build(self, manifest: dict[str, Any], lock: _Lock) -> Ledger:
        ledger = Ledger.read(self.store)
        claim(self.store, manifest, ledger)
        if ledger.finished:
            return ledger
        self.on_begin()
        keeper = _Keeper(self, ledger, lock)
        keeper.tick(force=True)
        todo = [index for index in range(len(self.shards)) if self.store.read(shard_key(index)) is None]
        jobs = [self._job(index) for index in todo]
        workers = self.options.workers([self.shards[index] for index in todo])
        if self.options.ray is not None and jobs:
            run_on_ray(jobs, self.options.ray, keeper.tick)
        elif workers:
            run_in_processes(jobs, workers, keeper.tick)
        else:
            for job in jobs:
                build_shard(job, on_rows=keeper.add, stopped=self.stopped)
        return keeper.finish()

    def report(self, ledger: Ledger | None = None, uncommitted: int = 0) -> None:
        """Tells `on_ledger` and `on_progress` how far the ledger is.

        Raises:
            Stopped: if the build is to end.
        """
        if self.stopped():
            raise Stopped
        if self.on_progress is None and self.on_ledger is None:
            return
        ledger = ledger or Ledger.read(self.store)
        if self.on_ledger is not None:
            self.on_ledger(ledger)
        if self.on_progress is None:
            return
        sizes = [shard.text_size for shard in self.shards]
        total = None if None in sizes else sum(size for size in sizes if size is not None)
        done = sum(ledger.text_bytes) + uncommitted
        done = done if total is None else min(done, total)
        stored = sum(shard.size for shard in self.shards)
        read = sum(shard.size for shard in self.shards[: ledger.next[0]])
        share = done / total if total else read / stored if stored else 0.0
        now = time.monotonic()
        if self._begun is None:
            self._begun = (now, done, share)
        began, done_before, share_before = self._begun
        seconds, gained = now - began, share - share_before
        left = seconds / gained * (1 - share) if gained > 0 else None
        rate = (done - done_before) / seconds if seconds > 0 else 0.0
        self.on_progress(BuildProgress(self.name, done, total, ledger.num_tokens, share, rate, left))

    def _job(self, index: int) -> Job:
        options = self.options
        return Job(
            self.store,
            index,
            self.shards[index],
            self.tokenizer,
            options.part_bytes,
            options.raise_on_bad_row,
            self.format,
        )

    def check_bad_rows(self, ledger: Ledger) -> None:
        """Refuses a cache with more bad rows than the options accept."""
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


class _Keeper:
    """Keeps ledger, heartbeat and progress up to date while others work."""

    def __init__(self, build: Build, ledger: Ledger, lock: _Lock):
        self.build, self.ledger, self.lock = build, ledger, lock
        self.uncommitted, self.last = 0, 0.0

    def add(self, text_bytes: int) -> None:
        self.uncommitted += text_bytes
        self.tick()

    def tick(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self.last < POLL_SECONDS:
            return
        self.last = now
        self.lock.beat()
        before = sum(self.ledger.text_bytes)
        if self.ledger.advance(self.build.store, len(self.build.shards)):
            self.ledger.write(self.build.store)
            self.uncommitted = max(0, self.uncommitted - (sum(self.ledger.text_bytes) - before))
        self.build.report(self.ledger, self.uncommitted)

    def finish(self) -> Ledger:
        self.tick(force=True)
        if self.ledger.num_documents == 0:
            raise UserError(
                f"the {self.build.name} data holds no text: {self.ledger.rows} rows, all of them empty or bad"
            )
        self.build.check_bad_rows(self.ledger)
        self.ledger.finished = True
        self.ledger.write(self.build.store)
        return self.ledger


_held: set[str] = set()
"""The claims of this process that hold. Its number alone does not tell: a dead process may have had the same."""


class _Lock:
    """Lets one builder work at a time. Only a courtesy: two at once would write the same bytes."""

    def __init__(self, store: Store, on_wait: Callable[[], None]):
        self.store, self.on_wait, self.last = store, on_wait, 0.0
        self.me = {"host": socket.gethostname(), "pid": os.getpid(), "claim": uuid.uuid4().hex}

    def __enter__(self) -> _Lock:
        # Held before it can be read: who reads a claim that is not held takes it for a dead process's.
        _held.add(self.me["claim"])
        try:
            self._wait()
        except BaseException:
            _held.discard(self.me["claim"])
            raise
        return self

    def _wait(self) -> None:
        while True:
            found, generation = self.store.read_versioned(BUILDER)
            free = found is None or not self._alive(json.loads(found))
            if free and self.store.write_json(BUILDER, self._record(), if_generation=generation):
                return
            self.on_wait()
            time.sleep(POLL_SECONDS)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.store.delete(BUILDER)
        except UserError:
            if kind is None:
                raise
        finally:
            _held.discard(self.me["claim"])

    def beat(self) -> None:
        if time.monotonic() - self.last >= BEAT_SECONDS:
            self.last = time.monotonic()
            self.store.write_json(BUILDER, self._record())

    def _record(self) -> dict[str, Any]:
        return {**self.me, "beat": time.time()}

    def _alive(self, record: dict[str, Any] | None) -> bool:
        if record is None or time.time() - record["beat"] > DEAD_SECONDS:
            return False
        if record["host"] != self.me["host"]:
            return True
        if record["pid"] == self.me["pid"]:
            return record.get("claim") in _held
        try:
            os.kill(record["pid"], 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True
