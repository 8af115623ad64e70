"""The lock of a cache, which lets one process build at a time, and detects builders that have died."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.core.process_id import ProcessId
from lm_trainer.data.cache.format import BUILDER
from lm_trainer.data.cache.kvstore import KvStore, parse_checked_json

BEAT_SECONDS, DEAD_SECONDS, POLL_SECONDS = 2.0, 30.0, 0.2

# The process id is not enough to decide if a claim is held, because a dead process may have had the same id, and this
# process may run two builds.
_held: set[str] = set()
"""Ids of the claims that this process holds."""


Claim = dict[str, Any]
"""A builder's claim: its `host`, its `pid`, its last heartbeat `beat` in seconds since 1970, and the unique id `claim`,
which earlier versions did not write."""


def parse_claim(content: bytes | None) -> Claim | None:
    """Parses the claim of a builder.

    Returns None for a missing or damaged claim, whose writer is considered dead.
    """
    try:
        claim = parse_checked_json(content or b"null")
    except ValueError:
        return None
    if not isinstance(claim, dict) or ProcessId.from_record(claim) is None:
        return None
    return claim if isinstance(claim.get("beat"), int | float) else None


class BuilderLock:
    """Lets one builder work at a time. This only saves work, as two builders at once would write the same bytes.

    Args:
        store: the cache.
        on_wait: called several times a second while another builder works. An error that it raises ends the wait.
    """

    def __init__(self, store: KvStore, on_wait: Callable[[], None]):
        self._store, self._on_wait, self._last_beat = store, on_wait, 0.0
        process = ProcessId.of_this_process()
        # The boot id is left out because claims do not record it.
        self._process, self._claim = ProcessId(process.host, process.pid), uuid.uuid4().hex

    def __enter__(self) -> BuilderLock:
        # Registered before it is written, because a claim that is not in `_held` is considered a dead process's.
        _held.add(self._claim)
        try:
            self._wait()
        except BaseException:
            _held.discard(self._claim)
            raise
        return self

    def _wait(self) -> None:
        while True:
            content, generation = self._store.read_versioned(BUILDER)
            free = not self._is_own_claim(parse_claim(content))
            # The generation check lets only one of several waiting processes take over.
            if free and self._store.write_json(BUILDER, self._make_claim(), if_generation=generation):
                return
            self._on_wait()
            time.sleep(POLL_SECONDS)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._store.delete(BUILDER)
        except UserError:
            # After another error, such as a full disk, the original error is shown.
            if kind is None:
                raise
        finally:
            _held.discard(self._claim)

    def write_heartbeat(self) -> None:
        """Writes a heartbeat, unless the last heartbeat is younger than BEAT_SECONDS."""
        if time.monotonic() - self._last_beat >= BEAT_SECONDS:
            self._last_beat = time.monotonic()
            self._store.write_json(BUILDER, self._make_claim())

    def _make_claim(self) -> Claim:
        return {"host": self._process.host, "pid": self._process.pid, "claim": self._claim, "beat": time.time()}

    def _is_own_claim(self, claim: Claim | None) -> bool:
        if claim is None or time.time() - claim["beat"] > DEAD_SECONDS:
            return False
        builder = ProcessId(claim["host"], claim["pid"])
        if builder == self._process:
            return claim.get("claim") in _held
        # Processes on other machines are not visible from here, so only their heartbeat counts.
        return not builder.has_ended()
