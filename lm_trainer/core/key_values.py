"""Objects by their keys, in any store that TensorStore opens. A write is atomic."""

from __future__ import annotations

import contextlib
import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from lm_trainer.core.errors import MachineError, UserError

MISSING = b"\x02"
"""The generation of an object that does not exist."""
_SLOWEST = 2**20
"""Bytes per second of a connection that is waited for."""
# Of TensorStore, for each request, below the deadline of the whole operation.
_RETRIES = {"max_retries": 1000, "initial_delay": "200ms", "max_delay": "5s"}
_REMOTE = ("gcs", "s3", "http")

_ESCAPED = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|([\"'\\]))")


class KeyValues(ABC):
    """Objects below one prefix of a store; nothing is asked of a server before it is used.

    Each object is seen by everybody as soon as it is there. Requests to a server that fail in passing (a lost
    connection, 429, 500, 503) are repeated until a deadline.
    """

    remote = True
    """True where a server answers, so that a request has a deadline."""
    deadline = 120.0
    """Seconds for a request to a server for which none are named."""

    @property
    @abstractmethod
    def store_spec(self) -> Any:
        """TensorStore's specification of the store that the prefix is in."""

    @property
    @abstractmethod
    def prefix(self) -> str:
        """Prefix of every key; empty, or ends with a slash."""

    @abstractmethod
    def reason(self, error: Exception, seconds: float) -> str:
        """Returns why a request failed; with `TimeoutError`, after so many seconds."""

    @abstractmethod
    def failure(self, verb: str, key: str, error: Exception, seconds: float) -> UserError:
        """Returns what to raise for a request that failed, such as to `read` a key."""

    def deadline_for(self, count: int) -> float:
        """Returns the seconds for a request that sends or receives `count` bytes."""
        return self.deadline + count / _SLOWEST

    @functools.cached_property
    def _kv(self) -> Any:
        return self._open(context())

    def _open(self, opened_in: Any) -> Any:
        import tensorstore as ts

        # The store as a whole: some servers list more than they were asked for, which whole names tell.
        with _failures(partial(self.failure, "open", ""), self.deadline):
            return ts.KvStore.open(self.store_spec, context=opened_in).result(self.deadline)

    def read(self, key: str, *, within: slice = slice(None), seconds: float | None = None) -> bytes | None:
        """Returns an object, or the bytes of it `within` bounds, or None if there is none."""
        return self.read_versioned(key, within=within, seconds=seconds)[0]

    def read_versioned(
        self, key: str, *, within: slice = slice(None), seconds: float | None = None
    ) -> tuple[bytes | None, bytes]:
        """Returns what `read` does, and the generation that a conditional write may name."""
        future = self._kv.read(self.prefix + key, byte_range=within)
        result = self._wait(future, partial(self.failure, "read", key), seconds)
        generation = bytes(result.stamp.generation)
        # A server that names no generation gives zero, which is none: a write that names it is unconditional.
        versioned = any(generation) or not self.remote
        return (result.value if result.state == "value" else None), generation if versioned else b""

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> Iterator[bytes]:
        """Yields the bytes [first, last) of each (key, first, last); none of an object that does not exist.

        Raises:
            MachineError: when they cannot be read.
        """
        import tensorstore as ts

        # TensorStore joins the ranges of one batch that are close together, and asks for them at the same time.
        with ts.Batch() as batch:
            futures = [
                self._kv.read(self.prefix + key, byte_range=slice(first, last), batch=batch)
                for key, first, last in ranges
            ]
        # All of them share the connection.
        seconds = self.deadline_for(sum(last - first for _, first, last in ranges))
        for (key, _, _), future in zip(ranges, futures, strict=True):
            yield self._wait(future, partial(self._unread, key), seconds).value

    def _unread(self, key: str, error: Exception, seconds: float) -> MachineError:
        return MachineError(f"cannot read {self}/{key}: {self.reason(error, seconds)}")

    def write(
        self, key: str, value: bytes, *, if_generation: bytes | None = None, seconds: float | None = None
    ) -> bytes:
        """Writes an object and returns its generation; empty if it no longer had the generation that was named.

        Args:
            key: below the prefix.
            value: the content.
            if_generation: what the object must be at; `MISSING`: it must not exist.
            seconds: until the deadline.
        """
        failure = partial(self.failure, "write", key)
        seconds = self.deadline_for(len(value)) if seconds is None else seconds
        # A store that can only be read refuses at once.
        with _failures(failure, seconds):
            future = self._kv.write(self.prefix + key, value, if_equal=if_generation)
        return bytes(self._wait(future, failure, seconds).generation)

    def delete(self, *keys: str, seconds: float | None = None) -> None:
        """Deletes objects; a key that does not exist is skipped."""
        futures = []
        for key in keys:
            failure = partial(self.failure, "delete", key)
            with _failures(failure, self.deadline):
                futures.append((self._kv.write(self.prefix + key, None), failure))
        for future, failure in futures:
            self._wait(future, failure, seconds)

    def list(self, key: str = "", *, seconds: float | None = None) -> list[str]:
        """Returns the names of all objects below `key`, relative to it, sorted."""
        import tensorstore as ts

        start = self.prefix + (f"{key}/" if key else "")
        # "0" is the character after "/".
        within = ts.KvStore.KeyRange(start, f"{start[:-1]}0") if start else ts.KvStore.KeyRange()
        failure = partial(self.failure, "list", key)
        with _failures(failure, self.deadline):
            future = self._kv.list(within)
        names = {name.decode() for name in self._wait(future, failure, seconds)}
        return sorted(name.removeprefix(start) for name in names if name.startswith(start))

    def _wait(self, future: Any, failure: _Failure, seconds: float | None) -> Any:
        seconds = self.deadline if seconds is None else seconds
        with _failures(failure, seconds):
            try:
                return future.result(timeout=seconds if self.remote else None)
            finally:
                future.cancel()


_Failure = Callable[[Exception, float], UserError]


@contextlib.contextmanager
def _failures(failure: _Failure, seconds: float) -> Iterator[None]:
    """Raises what `failure` makes of an error of TensorStore."""
    try:
        yield
    except UserError:
        # Of the handler of a stop signal, which came while the server was waited for.
        raise
    except Exception as error:
        raise failure(error, seconds) from None


@functools.cache
def _shared_context() -> Any:
    import tensorstore as ts

    return ts.Context({f"{protocol}_request_retries": _RETRIES for protocol in _REMOTE})


def context(**resources: Any) -> Any:
    """TensorStore's context, which says how often a request is repeated; with `resources`, a new one."""
    import tensorstore as ts

    return ts.Context(resources, parent=_shared_context()) if resources else _shared_context()


def reason_of(error: object) -> str:
    """Returns TensorStore's reason for a failure in plain text.

    TensorStore escapes paths in its messages, and ends the directories in them by zero bytes.
    """
    text = str(error).split(" [source locations")[0].encode()
    plain = _ESCAPED.sub(lambda found: found[2] or bytes([int(found[1], 16)]), text)
    return plain.replace(b"\0", b"/").decode(errors="replace")
