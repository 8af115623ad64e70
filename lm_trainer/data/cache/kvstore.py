"""The key-value store that holds a cache."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from lm_trainer.core.bucket import Bucket, explain_failed_request, is_bucket
from lm_trainer.core.checksummed import CHECKSUM, has_valid_checksum, with_checksum
from lm_trainer.core.config import PathType
from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.files import expand_home
from lm_trainer.core.key_values import KeyValues, plain_error_text

CachePath = Annotated[str, PathType(schemes=("gs", "s3", "file", "memory", "http", "https"))]
"""A directory, or a URL for which TensorStore has a driver."""

# TensorStore raises the same error type for every failure, so only the message distinguishes a full disk from a refused
# write.
_FULL = re.compile(r"RESOURCE_EXHAUSTED|No space left|Disk quota|File too large|os_error_code='(28|27|122)'")
_REFUSED = re.compile(
    r"PERMISSION_DENIED|FAILED_PRECONDITION|UNAUTHENTICATED|NOT_FOUND|INVALID_ARGUMENT|Errno (13|20|30)"
)


class KvStore(KeyValues):
    """A key-value store in one directory or URL. Picklable.

    Args:
        url: a path, or a URL of `gs://`, `s3://`, `file://` or `memory://`; `http(s)://` is read-only.

    Raises:
        UserError: if TensorStore has no driver for the URL.
    """

    def __init__(self, url: str):
        self.local: Path | None = None
        """The directory, if it is on this machine and can be memory-mapped."""
        self._bucket: Bucket | None = None
        if "://" not in url or url.startswith("file://"):
            self.local = Path(expand_home(url.removeprefix("file://"))).absolute()
            self.url = str(self.local)
        else:
            self.url = url.rstrip("/")
            # Uses the same endpoints and credentials as for other bucket files.
            self._bucket = Bucket(self.url) if is_bucket(self.url) else None
        self.remote = self.local is None and not self.url.startswith("memory://")
        _ = self._kv  # opened now, so that an unusable URL is reported immediately

    def __str__(self) -> str:
        return self.url

    def __reduce__(self) -> tuple[type[KvStore], tuple[str]]:
        # TensorStore's handle cannot be pickled, so the receiving process opens a new one.
        return type(self), (self.url,)

    @property
    def store_spec(self) -> str | dict[str, object]:
        """TensorStore's specification of the directory, or of the whole bucket that contains it."""
        if self._bucket is not None:
            return self._bucket.store_spec
        return {"driver": "file", "path": f"{self.local}/"} if self.local is not None else f"{self.url}/"

    @property
    def prefix(self) -> str:
        """Prefix of every key within the bucket."""
        return self._bucket.prefix if self._bucket is not None else ""

    def read_json(self, key: str) -> Any:
        """Returns the value of a JSON key; None if the key does not exist.

        Raises:
            UserError: if the value is damaged (by a manual edit or a failing disk).
        """
        value = self.read(key)
        try:
            return None if value is None else parse_checked_json(value)
        except ValueError as error:
            raise UserError(f"{self.url}/{key} is damaged: {error}. Remove {self.url} to build it again") from None

    def write_json(self, key: str, value: Mapping[str, object], *, if_generation: bytes | None = None) -> bytes:
        """Writes an object as canonical JSON with a checksum. Otherwise like `write`."""
        return self.write(key, canonical_json(with_checksum(value)), if_generation=if_generation)

    def failure_reason(self, error: Exception, seconds: float) -> str:
        """Returns the reason why a request failed."""
        if self._bucket is not None:
            return explain_failed_request(error, self._bucket, seconds)
        if isinstance(error, TimeoutError):
            return f"the server has not answered within {seconds:.0f} s"
        return plain_error_text(_error_text(error))

    def request_error(self, verb: str, key: str, error: Exception, seconds: float) -> UserError:
        """Returns a `MachineError`, for example for a full disk, or a `UserError` if another directory would work."""
        text, reason = _error_text(error), self.failure_reason(error, seconds)
        if verb == "open":
            return UserError(f"cannot use {self.url} as a cache directory: {reason}")
        if isinstance(error, NotImplementedError):
            return UserError(
                f"{self.url} can only be read; set data.cache_dir to another place, or, if a finished cache is there, "
                "write data.source: {type: cache, path: URL}"
            )
        if _FULL.search(text):
            return MachineError(
                f"the disk is full: cannot {verb} {self.url}/{key}. Everything written before is kept and used again; "
                f"make room or set data.cache_dir to another disk. ({reason})"
            )
        if _REFUSED.search(text):
            return UserError(
                f"cannot {verb} {self.url}/{key}: {reason}. Set data.cache_dir to a directory that can be written"
            )
        return MachineError(f"cannot {verb} {self.url}/{key}: {reason}")


def _error_text(error: Exception) -> str:
    # The cause of a failed write is in the error's context.
    return f"{error} {error.__context__ or ''}".strip()


def parse_checked_json(content: bytes) -> Any:
    """Parses a file written by `KvStore.write_json`. Files of earlier versions have no checksum.

    Raises:
        ValueError: if it is damaged.
    """
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("it is not JSON that was written here") from None
    if isinstance(value, dict) and CHECKSUM in value:
        if not has_valid_checksum(value):
            raise ValueError("its checksum differs")
        del value[CHECKSUM]
    return value


def canonical_json(value: object) -> bytes:
    """Encodes a JSON value such that equal values have equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
