"""Directories in object storage, and error messages that give a remedy for failed requests."""

from __future__ import annotations

import configparser
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from lm_trainer.core.credentials import without_credentials
from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.files import expand_home
from lm_trainer.core.key_values import KeyValues, plain_error_text, tensorstore_context
from lm_trainer.core.safe_names import check_relative_path

_PROBE_SECONDS = 10.0
_FEW_RETRIES = {"max_retries": 4, "initial_delay": "200ms", "max_delay": "1s"}
_MAX_REASON_CHARS = 300
"""Maximum number of characters to quote from an error."""

_RESPONSE_DETAILS = re.compile(r" \[(http_response|x-amz|tensorstore_spec).*", re.DOTALL)
_DENIED = re.compile(
    r"PERMISSION_DENIED|UNAUTHENTICATED|\b40[13]\b|AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch"
)
_ABSENT = re.compile(r"NOT_FOUND|NoSuchBucket|\b404\b")
_UNREACHABLE = re.compile(r"CURL error|UNAVAILABLE")
_REGION = re.compile(r"PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint|\b301\b")
_CLOCK = re.compile(r"RequestTimeTooSkewed")


def _s3_spec(bucket: str, path: str) -> dict[str, Any]:
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": path}
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or _profile_endpoint():
        spec["endpoint"] = endpoint.rstrip("/")
    if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        spec["aws_region"] = region
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        # The default provider chain would log a complaint for every missing credentials file.
        spec["aws_credentials"] = {"type": "environment"}
    return spec


def _profile_endpoint() -> str | None:
    """Returns the endpoint of the profile in ~/.aws/config, from which TensorStore reads only credentials."""
    file = Path(expand_home(os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")))
    profiles = configparser.ConfigParser(interpolation=None)
    if not file.is_file():
        return None
    try:
        profiles.read(file)
    except (configparser.Error, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {' '.join(str(error).split())}") from None
    name = os.environ.get("AWS_PROFILE", "default")
    section = "default" if name == "default" else f"profile {name}"
    return profiles.get(section, "endpoint_url", fallback=None)


def _gcs_spec(bucket: str, path: str) -> dict[str, Any]:
    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
        # Google's libraries read STORAGE_EMULATOR_HOST, but TensorStore has its own variable.
        url = emulator if "://" in emulator else f"http://{emulator}"
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", url.rstrip("/"))
    if "TENSORSTORE_GCS_HTTP_URL" in os.environ and "GOOGLE_APPLICATION_CREDENTIALS" not in os.environ:
        # An emulator accepts any token. Without a token, TensorStore queries the metadata server of a cloud machine.
        os.environ.setdefault("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
    return {"driver": "gcs", "bucket": bucket, "path": path}


SCHEMES: dict[str, Callable[[str, str], dict[str, Any]]] = {"gs": _gcs_spec, "s3": _s3_spec}
"""Maps a URL scheme to a function from bucket and prefix to TensorStore's specification."""

STORAGE_SCHEMES = (*SCHEMES, "file")
"""URL schemes that are accepted for the locations of runs, checkpoints and exports."""


class Bucket(KeyValues):
    """A directory in object storage. See `KeyValues` for reading and writing.

    Args:
        url: `gs://BUCKET/PREFIX` or `s3://BUCKET/PREFIX`.

    Raises:
        UserError: if the URL names no bucket, or its prefix has parts such as `..`.
    """

    def __init__(self, url: str):
        scheme, _, location = url.partition("://")
        bucket, _, path = location.partition("/")
        if scheme not in SCHEMES or not bucket:
            raise UserError(f"{url}: expected {' or '.join(f'{scheme_}://BUCKET/DIRECTORY' for scheme_ in SCHEMES)}")
        self.scheme, self.bucket = scheme, bucket
        self.path = "/".join(part for part in path.split("/") if part)
        if self.path:
            check_relative_path(self.path, url)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.path}" if self.path else "")

    def __repr__(self) -> str:
        return f"Bucket({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bucket) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: object) -> Bucket:
        return Bucket(f"{self}/{name}")

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(self.path).name or self.bucket

    @property
    def parent(self) -> Bucket:
        """The parent directory. The bucket itself has none."""
        if not self.path:
            raise ValueError(f"{self} has no parent")
        return Bucket(f"{self.scheme}://{self.bucket}/{'/'.join(self.path.split('/')[:-1])}")

    def spec(self, key: str = "") -> dict[str, Any]:
        """Returns TensorStore's specification of the keys below `key`."""
        return SCHEMES[self.scheme](self.bucket, self.prefix + (f"{key}/" if key else ""))

    @property
    def store_spec(self) -> dict[str, Any]:
        """TensorStore's specification of the whole bucket."""
        return SCHEMES[self.scheme](self.bucket, "")

    @property
    def prefix(self) -> str:
        """Prefix of every key below this directory."""
        return f"{self.path}/" if self.path else ""

    def delete_below(self, key: str, *, seconds: float | None = None) -> None:
        """Deletes every object below a key. `seconds` is the deadline of each request."""
        self.delete(*(f"{key}/{name}" for name in self.list(key, seconds=seconds)), seconds=seconds)

    def check_writable(self, setting: str) -> None:
        """Checks early that objects can be written, listed and deleted here.

        Args:
            setting: the name of the setting with which the user can choose another location.

        Raises:
            UserError: if one of these fails, for example because the bucket does not exist.
        """
        try:
            self.check_access()
        except MachineError as error:
            raise UserError(f"{error}; or choose another place with {setting}") from None

    def check_access(self) -> None:
        """Checks within seconds that objects can be written and deleted.

        Raises `MachineError` with the reason if not.
        """
        key = f".probe/{os.getpid()}-{time.time_ns()}"
        bucket = Bucket(str(self))
        # Only a few retries, so that the server's refusal is reported soon.
        bucket._kv = bucket._open(
            tensorstore_context(gcs_request_retries=_FEW_RETRIES, s3_request_retries=_FEW_RETRIES)
        )
        bucket.write(key, b"probe", seconds=_PROBE_SECONDS)
        if key.partition("/")[2] not in bucket.list(".probe", seconds=_PROBE_SECONDS):
            raise MachineError(f"{self}: what was written does not appear in the list of objects")
        bucket.delete(key, seconds=_PROBE_SECONDS)

    def failure_reason(self, error: Exception, seconds: float) -> str:
        """Returns the reason why a request failed, with a remedy."""
        return explain_failed_request(error, self, seconds)

    def request_error(self, verb: str, key: str, error: Exception, seconds: float) -> MachineError:
        """Returns the error to raise for a failed request."""
        return MachineError(f"{self}: cannot {verb} {key or 'objects'}: {self.failure_reason(error, seconds)}")


StoragePath = Path | Bucket
"""A directory on this machine or in object storage."""


def storage_path(path: str | os.PathLike[str]) -> StoragePath:
    """Returns the directory for a path (`~` is expanded) or for a URL with one of the `STORAGE_SCHEMES`."""
    text = os.fspath(path)
    scheme, separator, location = text.partition("://")
    if not separator:
        return Path(expand_home(path))
    if scheme == "file":
        return Path(location)
    return Bucket(text)


def is_bucket(path: str | os.PathLike[str]) -> bool:
    """Returns True if a path is a URL of object storage."""
    return isinstance(path, str) and path.partition("://")[0] in SCHEMES and "://" in path


def read_json(directory: Bucket, key: str) -> dict[str, Any]:
    """Reads a JSON object from storage. Returns an empty dict if the key does not exist.

    Raises:
        MachineError: if the content is not a JSON object.
    """
    content = directory.read(key)
    try:
        value = json.loads(content) if content is not None else {}
    except ValueError as error:
        raise MachineError(f"{directory}/{key} is damaged: {error}") from None
    if not isinstance(value, Mapping):
        raise MachineError(f"{directory}/{key} is damaged: it holds no JSON object")
    return dict(value)


def explain_failed_request(error: BaseException, directory: Bucket, seconds: float) -> str:
    """Explains in one line why a request to object storage failed and how to fix it."""
    endpoint = directory.spec().get("endpoint") or os.environ.get("TENSORSTORE_GCS_HTTP_URL") or "that of the cloud"
    check = f"check the network and the endpoint ({without_credentials(endpoint)})"
    if isinstance(error, TimeoutError):
        return f"the server has not answered within {seconds:.0f} s; {check}"
    text = f"{error} {error.__context__ or ''}".strip()
    reason = " ".join(without_credentials(_RESPONSE_DETAILS.sub("", plain_error_text(text))).split())[
        :_MAX_REASON_CHARS
    ]
    for pattern, remedy in (
        (_UNREACHABLE, f"the server cannot be reached; {check}"),
        (_REGION, "the bucket is in another region; set AWS_REGION"),
        (_CLOCK, "the clock of this machine is wrong; set it"),
        (_DENIED, "the server refuses; check the credentials and what they permit (write, list, read, delete)"),
        (_ABSENT, f"there is no bucket {directory.bucket}; create it, or mend its name"),
    ):
        if pattern.search(text):
            return f"{remedy} ({reason})"
    return reason
