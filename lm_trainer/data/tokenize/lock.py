"""Lock of a cache: lets one process build at a time, and tells a dead builder from a living one."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.core.process_id import ProcessId
from lm_trainer.data.cache.format import BUILDER
from lm_trainer.data.cache.kvstore import KvStore, parsed_json

BEAT_SECONDS, DEAD_SECONDS, POLL_SECONDS = 2.0, 30.0, 0.2

# A process number alone does not tell whether a claim holds: a dead process may have had the same, and so may two
# builds of this one.
_held: set[str] = set()
"""The claims of this process that hold."""


def parsed_claim(content: bytes | None) -> dict[str, Any] | None:
    """Returns the claim of a builder: `host`, `pid`, `beat` in seconds since 1970, and `claim` but of earlier versions.

    None where there is none, or only a damaged one: whoever wrote it is taken for dead.
    """
    try:
        claim = parsed_json(content or b"null")
    except ValueError:
        return None
    if not isinstance(claim, dict) or ProcessId.parsed(claim) is None:
        return None
    return claim if isinstance(claim.get("beat"), int | float) else None


class BuilderLock:
    """Lets one builder work at a time. Only a courtesy: two at once would write the same bytes.

    Args:
        store: the cache.
        on_wait: called several times a second while another builder works; an error from it ends the waiting.
    """

    def __init__(self, store: KvStore, on_wait: Callable[[], None]):
        self._store, self._on_wait, self._last_beat = store, on_wait, 0.0
        here = ProcessId.of_this_process()
        # Without the machine's start, which claims do not name.
        self._process, self._claim = ProcessId(here.host, here.pid), uuid.uuid4().hex

    def __enter__(self) -> BuilderLock:
        # Held before it can be read: whoever reads a claim that is not held takes it for a dead process's.
        _held.add(self._claim)
        try:
            self._wait()
        except BaseException:
            _held.discard(self._claim)
            raise
        return self

    def _wait(self) -> None:
        while True:
            found, generation = self._store.read_versioned(BUILDER)
            free = not self._holds(parsed_claim(found))
            # The condition on the generation lets only one of several waiting processes take over.
            if free and self._store.write_json(BUILDER, self._record(), if_generation=generation):
                return
            self._on_wait()
            time.sleep(POLL_SECONDS)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._store.delete(BUILDER)
        except UserError:
            # After another error, such as a full disk, that one is the cause to show.
            if kind is None:
                raise
        finally:
            _held.discard(self._claim)

    def beat(self) -> None:
        """Writes the heartbeat, if the last one is old enough."""
        if time.monotonic() - self._last_beat >= BEAT_SECONDS:
            self._last_beat = time.monotonic()
            self._store.write_json(BUILDER, self._record())

    def _record(self) -> dict[str, Any]:
        return {"host": self._process.host, "pid": self._process.pid, "claim": self._claim, "beat": time.time()}

    def _holds(self, claim: dict[str, Any] | None) -> bool:
        if claim is None or time.time() - claim["beat"] > DEAD_SECONDS:
            return False
        builder = ProcessId(claim["host"], claim["pid"])
        if builder == self._process:
            return claim.get("claim") in _held
        # Processes of other machines cannot be asked for; there the heartbeat alone counts.
        return not builder.has_ended()
