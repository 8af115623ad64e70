"""Lock of a cache: lets one process build at a time, and tells a dead builder from a living one."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any

from lm_trainer.core.errors import UserError
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
    known = isinstance(claim, dict) and isinstance(claim.get("host"), str) and isinstance(claim.get("pid"), int)
    return claim if known and isinstance(claim.get("beat"), int | float) else None


class BuilderLock:
    """Lets one builder work at a time. Only a courtesy: two at once would write the same bytes.

    Args:
        store: the cache.
        on_wait: called several times a second while another builder works; an error from it ends the waiting.
    """

    def __init__(self, store: KvStore, on_wait: Callable[[], None]):
        self._store, self._on_wait, self._last_beat = store, on_wait, 0.0
        self._me = {"host": socket.gethostname(), "pid": os.getpid(), "claim": uuid.uuid4().hex}

    def __enter__(self) -> BuilderLock:
        # Held before it can be read: whoever reads a claim that is not held takes it for a dead process's.
        _held.add(self._me["claim"])
        try:
            self._wait()
        except BaseException:
            _held.discard(self._me["claim"])
            raise
        return self

    def _wait(self) -> None:
        while True:
            found, generation = self._store.read_versioned(BUILDER)
            free = not self._alive(parsed_claim(found))
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
            _held.discard(self._me["claim"])

    def beat(self) -> None:
        """Writes the heartbeat, if the last one is old enough."""
        if time.monotonic() - self._last_beat >= BEAT_SECONDS:
            self._last_beat = time.monotonic()
            self._store.write_json(BUILDER, self._record())

    def _record(self) -> dict[str, Any]:
        return {**self._me, "beat": time.time()}

    def _alive(self, record: dict[str, Any] | None) -> bool:
        if record is None or time.time() - record["beat"] > DEAD_SECONDS:
            return False
        # Processes of other machines cannot be asked for; there the heartbeat alone counts.
        if record["host"] != self._me["host"]:
            return True
        if record["pid"] == self._me["pid"]:
            return record.get("claim") in _held
        try:
            # Signal 0 is not sent; it only checks whether the process exists.
            os.kill(record["pid"], 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # it exists, and belongs to another user
            pass
        except OverflowError:  # no process has such a number
            return False
        return True
