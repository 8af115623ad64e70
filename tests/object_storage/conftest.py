"""A server of each protocol for the tests of a module."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from lm_trainer.core.bucket import Bucket
from tests.object_storage.servers import BUCKET, SERVERS, using

PACKAGES = {"s3": "moto.server", "gs": "gcp_storage_emulator"}


@pytest.fixture(scope="module", params=sorted(SERVERS))
def scheme(request: pytest.FixtureRequest) -> Iterator[str]:
    """The scheme of a server that runs, and that this process is pointed to."""
    pytest.importorskip(PACKAGES[request.param])
    with SERVERS[request.param]() as endpoint, using(request.param, endpoint):
        yield request.param


@pytest.fixture
def bucket(scheme: str) -> Bucket:
    """An empty directory in object storage."""
    return Bucket(f"{scheme}://{BUCKET}/{secrets.token_hex(4)}/run")
