"""Key-value store of a cache: TensorStore's KvStore, of which a cache needs a few atomic operations."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import tensorstore as ts

from lm_trainer.core.bucket import Bucket, is_bucket, reason_of
from lm_trainer.core.config import Takes
from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.files import expanded
from lm_trainer.core.seal import CHECKSUM, is_sealed, sealed

CachePath = Annotated[str, Takes(schemes=("gs", "s3", "file", "memory", "http", "https"))]
"""A directory, or a URL for which TensorStore has a driver."""

# TensorStore has one type of error for every failure, so only the text tells a full disk from a refused write.
_FULL = re.compile(r"RESOURCE_EXHAUSTED|No space left|Disk quota|File too large|os_error_code='(28|27|122)'")
_REFUSED = re.compile(
    r"PERMISSION_DENIED|FAILED_PRECONDITION|UNAUTHENTICATED|NOT_FOUND|INVALID_ARGUMENT|Errno (13|20|30)"
)


class KvStore:
    """Keys and their bytes below one directory or URL. Picklable.

    Args:
        url: a path, or a URL of `gs://`, `s3://`, `file://` or `memory://`; `http(s)://` can only be read.

    Raises:
        UserError: if TensorStore has no driver for the URL.
    """

    def __init__(self, url: str):
        self.local: Path | None = None
        """The directory, where it is on this machine and can be memory-mapped."""
        if "://" not in url or url.startswith("file://"):
            self.local = Path(expanded(url.removeprefix("file://"))).absolute()
            self.url = str(self.local)
            spec: Any = {"driver": "file", "path": f"{self.local}/"}
        else:
            self.url = url.rstrip("/")
            # With the endpoints and credentials that other files in buckets are found by.
            spec = Bucket(self.url).spec() if is_bucket(self.url) else f"{self.url}/"
        try:
            self._kv = ts.KvStore.open(spec).result()
        except (ValueError, OSError, NotImplementedError) as error:
            raise UserError(f"cannot use {self.url} as a cache directory: {reason_of(error)}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        # TensorStore's handle cannot be pickled; the receiving process opens one of its own.
        return type(self), (self.url,)

    def read(self, key: str) -> bytes | None:
        """Returns the value of a key, or None if there is none."""
        return self.read_versioned(key)[0]

    def read_versioned(self, key: str) -> tuple[bytes | None, bytes]:
        """Returns the value, or None, and the generation that a conditional write may name."""
        try:
            result = self._kv.read(key).result()
        except (ValueError, OSError) as error:
            self._fail("read", key, error)
        return (result.value if result.state == "value" else None), result.stamp.generation

    def read_json(self, key: str) -> Any:
        """Returns the value of a JSON key, or None if there is none.

        Raises:
            UserError: if it is not as it was written (only a hand or a failing disk can have done that).
        """
        value = self.read(key)
        try:
            return None if value is None else parsed_json(value)
        except ValueError as error:
            raise UserError(f"{self.url}/{key} is damaged: {error}. Remove {self.url} to build it again") from None

    def write(self, key: str, value: bytes, *, if_generation: bytes | None = None) -> bool:
        """Writes all of the value or nothing.

        Returns:
            False if the key no longer has the generation that was named, so that nothing was written.

        Raises:
            MachineError: if the disk is full.
            UserError: if the directory cannot be written.
        """
        try:
            stamp = self._kv.write(key, value, if_equal=if_generation).result()
        except (ValueError, OSError, NotImplementedError) as error:
            self._fail("write", key, error)
        # A conditional write that lost has an empty generation.
        return bool(stamp.generation)

    def write_json(self, key: str, value: Mapping[str, Any], *, if_generation: bytes | None = None) -> bool:
        """Writes an object as canonical JSON with a checksum; otherwise as `write`."""
        return self.write(key, canonical_json(sealed(value)), if_generation=if_generation)

    def delete(self, key: str) -> None:
        """Deletes a key, if it exists."""
        try:
            self._kv.write(key, None).result()
        except (ValueError, OSError, NotImplementedError) as error:
            self._fail("delete", key, error)

    def list(self, prefix: str = "") -> list[str]:
        """Returns all keys that begin with the prefix, sorted."""
        try:
            if not prefix:
                return sorted(key.decode() for key in self._kv.list().result())
            # Keys are ASCII, so 0x7f sorts after every key that has the prefix.
            return sorted(key.decode() for key in self._kv.list(ts.KvStore.KeyRange(prefix, f"{prefix}\x7f")).result())
        except (ValueError, OSError, NotImplementedError) as error:
            self._fail("list", prefix, error)

    def read_range(self, key: str, start: int, stop: int, batch: Any = None) -> Any:
        """Returns a future of the bytes [start, stop) of a value; reads of one `batch` go out together."""
        return self._kv.read(key, byte_range=slice(start, stop), batch=batch)

    def _fail(self, verb: str, key: str, error: Exception) -> NoReturn:
        if isinstance(error, NotImplementedError):
            raise UserError(
                f"{self.url} can only be read; set data.cache_dir to another place, or, if a finished cache is there, "
                "write data.source: {type: cache, path: URL}"
            ) from None
        # The cause of a failed write is an error raised while another was handled.
        text = f"{error} {error.__context__ or ''}".strip()
        reason = reason_of(text)
        if _FULL.search(text):
            raise MachineError(
                f"the disk is full: cannot {verb} {self.url}/{key}. Everything written before is kept and used again; "
                f"make room or set data.cache_dir to another disk. ({reason})"
            ) from None
        if _REFUSED.search(text):
            raise UserError(
                f"cannot {verb} {self.url}/{key}: {reason}. Set data.cache_dir to a directory that can be written"
            ) from None
        raise MachineError(f"cannot {verb} {self.url}/{key}: {reason}") from None


def parsed_json(content: bytes) -> Any:
    """Reads what `KvStore.write_json` has written; earlier versions wrote no checksum.

    Raises:
        ValueError: if it is not as it was written.
    """
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("it is not JSON that was written here") from None
    if isinstance(value, dict) and CHECKSUM in value:
        if not is_sealed(value):
            raise ValueError("its checksum differs")
        del value[CHECKSUM]
    return value


def canonical_json(value: Any) -> bytes:
    """Encodes a JSON value; equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
