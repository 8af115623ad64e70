"""A server of each protocol for the tests of a module."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from lm_trainer.core import bucket as bucket_module
from lm_trainer.core import key_values
from lm_trainer.core.bucket import Bucket
from tests.object_storage.proxy import Proxy, run_proxy
from tests.object_storage.servers import BUCKET, SERVERS, use_server

PACKAGES = {"s3": "moto.server", "gs": "gcp_storage_emulator"}


@pytest.fixture(scope="module", params=["s3", pytest.param("gs", marks=pytest.mark.slow)])
def scheme(request: pytest.FixtureRequest) -> Iterator[str]:
    """The scheme of a server that runs, and that this process is pointed to."""
    pytest.importorskip(PACKAGES[request.param])
    with SERVERS[request.param]() as endpoint, use_server(request.param, endpoint):
        yield request.param


@pytest.fixture
def bucket(scheme: str) -> Bucket:
    """An empty directory in object storage."""
    return Bucket(f"{scheme}://{BUCKET}/{secrets.token_hex(4)}/run")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The endpoint of an S3 server."""
    pytest.importorskip(PACKAGES["s3"])
    with SERVERS["s3"]() as endpoint:
        yield endpoint


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Requests are repeated for as long as in a run, with pauses that suit a server on loopback."""
    pauses = {"initial_delay": "2ms", "max_delay": "20ms"}
    # 250 times as many with a 250th of the longest pause: deadlines end the repetition, as they do in a run.
    monkeypatch.setattr(key_values, "_RETRIES", {"max_retries": 250_000, **pauses})
    monkeypatch.setattr(bucket_module, "_FEW_RETRIES", {**bucket_module._FEW_RETRIES, **pauses})
    key_values._shared_tensorstore_context.cache_clear()
    yield
    key_values._shared_tensorstore_context.cache_clear()


@pytest.fixture
def proxy(server: str, short_pauses: None) -> Iterator[Proxy]:
    """A proxy in front of it, to which this process is pointed."""
    with run_proxy(server) as running, use_server("s3", running.endpoint):
        yield running


@pytest.fixture
def behind(proxy: Proxy) -> Bucket:
    """An empty directory behind the proxy."""
    return Bucket(f"s3://{BUCKET}/{secrets.token_hex(4)}/run")
