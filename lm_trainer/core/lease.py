"""Locks a directory in object storage, with an object that its holder renews and that expires without renewal."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Self

from lm_trainer.core.bucket import Bucket
from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.key_values import MISSING
from lm_trainer.core.process_id import ProcessId

logger = logging.getLogger(__name__)

_KEY = ".lock"
RENEWED_EVERY = 5.0
"""Time in seconds between renewals."""
ENDS_AFTER = 30.0
"""Time in seconds without renewal after which another process may take the lease."""
_TAKEN_AT_ONCE_AFTER = 600.0
"""Age in seconds of the last renewal above which the lease is taken without waiting. The age depends on the clocks of
two machines, which must differ by less than this."""


class Lease:
    """Context manager that holds the lock of a directory for this process.

    The lease is taken by a conditional write, so only one of two competing processes gets it. It expires after
    `ENDS_AFTER` seconds without renewal, measured by the clock of the waiting process. If its holder has died on this
    machine, this is detected without waiting.

    Args:
        directory: the directory to lock.
        on_wait: called with a message if the process has to wait for the lease.

    Raises:
        UserError: if another process holds the lease.
    """

    def __init__(self, directory: Bucket, on_wait: Callable[[str], Any] | None = None):
        self._directory, self._on_wait = directory, on_wait
        self._token = secrets.token_hex(8)
        self._count = 0
        self._generation = b""
        self._lost: str | None = None
        self._renewed = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> Self:
        while not (self._try_acquire() or self._wait_for_expiry()):
            pass
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._lost is None:
            with contextlib.suppress(MachineError):
                self._directory.delete(_KEY, seconds=5)

    def check(self) -> None:
        """Raises `MachineError` if another process is known to have taken the lease. Sends no request."""
        if self._lost is not None:
            raise MachineError(
                f"{self._directory} was taken over by {self._lost}, while this process could not reach it; it stops "
                f"here, and what it has saved is whole"
            )

    def confirm(self) -> None:
        """Verifies that the lease is still held. Raises `MachineError` if it is not."""
        # While the server was unreachable from here, another process may have taken the lease.
        if self._lost is None and time.monotonic() - self._renewed > ENDS_AFTER - RENEWED_EVERY:
            self._renew_once()
        self.check()

    def _try_acquire(self) -> bool:
        content, generation = self._directory.read_versioned(_KEY)
        holder = _parse_holder(content)
        if content is not None and not _has_ended(holder):
            return False
        return self._write(MISSING if content is None else generation)

    def _wait_for_expiry(self) -> bool:
        """Takes the lease once it has expired. Returns False to retry, and raises an error if its holder renews it."""
        first, generation = self._directory.read_versioned(_KEY)
        if first is None or _has_ended(_parse_holder(first)):
            return False
        started = time.monotonic()
        while time.monotonic() - started < ENDS_AFTER:
            if self._on_wait is not None and time.monotonic() - started > 2 * RENEWED_EVERY:
                holder = _describe_holder(_parse_holder(first))
                self._on_wait(f"waiting for {holder}, which no longer answers, to lose {self._directory}")
            time.sleep(1)
            body, generation = self._directory.read_versioned(_KEY)
            if body is None:
                return False
            if body != first:
                holder = _describe_holder(_parse_holder(body))
                raise UserError(
                    f"{self._directory} is in use by {holder}; wait for it, stop it, or set trainer.id to another name"
                )
        return self._write(generation)

    def _write(self, generation: bytes) -> bool:
        """Overwrites the given generation of the lease. Returns True if this process now holds it."""
        self._count += 1
        written = self._directory.write(_KEY, self._new_content(), if_generation=generation, seconds=RENEWED_EVERY * 2)
        # A retry after a lost response conflicts with its own first attempt, so the content is compared.
        content, generation_after = self._directory.read_versioned(_KEY)
        if _parse_holder(content).get("token") != self._token:
            return False
        self._generation, self._renewed = written or generation_after, time.monotonic()
        return True

    def _new_content(self) -> bytes:
        holder = asdict(ProcessId.of_this_process())
        holder |= {"token": self._token, "count": self._count, "time": time.time()}
        return json.dumps(holder).encode()

    def _renew(self) -> None:
        while not self._stop.wait(RENEWED_EVERY):
            self._renew_once()

    def _renew_once(self) -> None:
        try:
            if not self._write(self._generation):
                self._lost = _describe_holder(_parse_holder(self._directory.read_versioned(_KEY)[0]))
        except MachineError as error:
            logger.debug("the lease could not be renewed: %s", error)


def _parse_holder(content: bytes | None) -> dict[str, Any]:
    try:
        holder = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _has_ended(holder: dict[str, Any]) -> bool:
    written = holder.get("time")
    if not isinstance(written, int | float) or abs(time.time() - written) > _TAKEN_AT_ONCE_AFTER:
        return True
    process = ProcessId.from_record(holder)
    # Machines may share a host name, so only the boot ID identifies this machine.
    return process is not None and process.boot != "" and process.has_ended()


def _describe_holder(holder: dict[str, Any]) -> str:
    return str(ProcessId.from_record(holder) or "another process")
