"""Key-value access to any store that TensorStore can open. Writes are atomic."""

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
"""The generation of a missing object."""
_MIN_BYTES_PER_SECOND = 2**20
"""Speed in bytes per second of the slowest connection for which deadlines are long enough."""
# TensorStore retries each request within the deadline of the operation.
_RETRIES = {"max_retries": 1000, "initial_delay": "200ms", "max_delay": "5s"}
_REMOTE = ("gcs", "s3", "http")

_ESCAPED = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|([\"'\\]))")


class KeyValues(ABC):
    """The objects below one prefix of a store. The first use opens the connection.

    A written object is visible to all readers at once. Transient failures of requests (a lost connection, 429, 500,
    503) are retried until a deadline.
    """

    remote = True
    """True if a server answers the requests, in which case they have a deadline."""
    deadline = 120.0
    """Default deadline of a request in seconds."""

    @property
    @abstractmethod
    def store_spec(self) -> Any:
        """TensorStore's specification of the store that contains the prefix."""

    @property
    @abstractmethod
    def prefix(self) -> str:
        """Prefix of every key. It is empty or ends with a slash."""

    @abstractmethod
    def failure_reason(self, error: Exception, seconds: float) -> str:
        """Returns the reason why a request failed. `seconds` is its deadline, for a `TimeoutError`."""

    @abstractmethod
    def request_error(self, verb: str, key: str, error: Exception, seconds: float) -> UserError:
        """Returns the error to raise for a failed request. `verb` is, for example, `read`."""

    def deadline_for(self, count: int) -> float:
        """Returns the deadline in seconds of a request that sends or receives `count` bytes."""
        return self.deadline + count / _MIN_BYTES_PER_SECOND

    @functools.cached_property
    def _kv(self) -> Any:
        return self._open(tensorstore_context())

    def _open(self, ts_context: Any) -> Any:
        import tensorstore as ts

        # Opens the store without the prefix, because some servers list more than requested, and full names reveal it.
        with _convert_errors(partial(self.request_error, "open", ""), self.deadline):
            return ts.KvStore.open(self.store_spec, context=ts_context).result(self.deadline)

    def read(self, key: str, *, within: slice = slice(None), seconds: float | None = None) -> bytes | None:
        """Returns the content of an object, limited to the byte range `within`; None if the object does not exist."""
        return self.read_versioned(key, within=within, seconds=seconds)[0]

    def read_versioned(
        self, key: str, *, within: slice = slice(None), seconds: float | None = None
    ) -> tuple[bytes | None, bytes]:
        """Returns the content of an object like `read`, and its generation, for a conditional write."""
        future = self._kv.read(self.prefix + key, byte_range=within)
        result = self._wait(future, partial(self.request_error, "read", key), seconds)
        generation = bytes(result.stamp.generation)
        # A server without generations returns zeros, and a write conditional on zeros would be unconditional.
        versioned = any(generation) or not self.remote
        return (result.value if result.state == "value" else None), generation if versioned else b""

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> Iterator[bytes]:
        """Yields the bytes [first, last) of each (key, first, last); no bytes for a missing object.

        Raises:
            MachineError: if the objects cannot be read.
        """
        import tensorstore as ts

        # TensorStore merges nearby ranges of a batch, and requests them concurrently.
        with ts.Batch() as batch:
            futures = [
                self._kv.read(self.prefix + key, byte_range=slice(first, last), batch=batch)
                for key, first, last in ranges
            ]
        # All ranges share the connection.
        seconds = self.deadline_for(sum(last - first for _, first, last in ranges))
        for (key, _, _), future in zip(ranges, futures, strict=True):
            yield self._wait(future, partial(self._read_error, key), seconds).value

    def _read_error(self, key: str, error: Exception, seconds: float) -> MachineError:
        return MachineError(f"cannot read {self}/{key}: {self.failure_reason(error, seconds)}")

    def write(
        self, key: str, value: bytes, *, if_generation: bytes | None = None, seconds: float | None = None
    ) -> bytes:
        """Writes an object and returns its new generation; empty if it did not have the required generation before.

        Args:
            key: key below the prefix.
            value: the content.
            if_generation: the generation that the object must have; `MISSING` if it must not exist.
            seconds: deadline in seconds.
        """
        failure = partial(self.request_error, "write", key)
        seconds = self.deadline_for(len(value)) if seconds is None else seconds
        # A read-only store refuses the write here, before any request.
        with _convert_errors(failure, seconds):
            future = self._kv.write(self.prefix + key, value, if_equal=if_generation)
        return bytes(self._wait(future, failure, seconds).generation)

    def delete(self, *keys: str, seconds: float | None = None) -> None:
        """Deletes objects. Missing keys are skipped."""
        futures = []
        for key in keys:
            failure = partial(self.request_error, "delete", key)
            with _convert_errors(failure, self.deadline):
                futures.append((self._kv.write(self.prefix + key, None), failure))
        for future, failure in futures:
            self._wait(future, failure, seconds)

    def list(self, key: str = "", *, seconds: float | None = None) -> list[str]:
        """Returns the sorted names of all objects below `key`, relative to it."""
        import tensorstore as ts

        start = self.prefix + (f"{key}/" if key else "")
        # "0" is the character after "/".
        within = ts.KvStore.KeyRange(start, f"{start[:-1]}0") if start else ts.KvStore.KeyRange()
        failure = partial(self.request_error, "list", key)
        with _convert_errors(failure, self.deadline):
            future = self._kv.list(within)
        names = {name.decode() for name in self._wait(future, failure, seconds)}
        return sorted(name.removeprefix(start) for name in names if name.startswith(start))

    def _wait(self, future: Any, failure: _Failure, seconds: float | None) -> Any:
        seconds = self.deadline if seconds is None else seconds
        with _convert_errors(failure, seconds):
            try:
                return future.result(timeout=seconds if self.remote else None)
            finally:
                future.cancel()


_Failure = Callable[[Exception, float], UserError]


@contextlib.contextmanager
def _convert_errors(failure: _Failure, seconds: float) -> Iterator[None]:
    """Converts errors of TensorStore to the result of `failure`."""
    try:
        yield
    except UserError:
        # The handler of a stop signal raises this during the wait for the server.
        raise
    except Exception as error:
        raise failure(error, seconds) from None


@functools.cache
def _shared_tensorstore_context() -> Any:
    import tensorstore as ts

    return ts.Context({f"{protocol}_request_retries": _RETRIES for protocol in _REMOTE})


def tensorstore_context(**resources: Any) -> Any:
    """Returns TensorStore's shared context with the retry settings; with `resources`, a new context derived from it."""
    import tensorstore as ts

    return ts.Context(resources, parent=_shared_tensorstore_context()) if resources else _shared_tensorstore_context()


def plain_error_text(error: object) -> str:
    """Returns TensorStore's reason for a failure in plain text.

    In its messages, TensorStore escapes paths, and terminates directories with zero bytes.
    """
    text = str(error).split(" [source locations")[0].encode()
    plain = _ESCAPED.sub(lambda match: match[2] or bytes([int(match[1], 16)]), text)
    return plain.replace(b"\0", b"/").decode(errors="replace")
