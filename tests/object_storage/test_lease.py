"""The lock of a run in object storage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from lm_trainer.core import lease as module
from lm_trainer.core.bucket import Bucket
from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.lease import Lease
from lm_trainer.core.process_id import ProcessId
from tests.hangs import HANG_SECONDS
from tests.object_storage.conditional_gcs import conditional_gcs
from tests.object_storage.servers import run_s3_server, use_server


@pytest.fixture(scope="module", params=["s3", "gs"])
def scheme(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server of each protocol that heeds preconditions."""
    if request.param == "s3":
        pytest.importorskip("moto.server")
    with (
        (run_s3_server if request.param == "s3" else conditional_gcs)() as endpoint,
        use_server(request.param, endpoint),
    ):
        yield request.param


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that are renewed and end soon, and who waits for one looks at it ten times a second, not once."""
    monkeypatch.setattr(module, "RENEWED_EVERY", 0.3)
    monkeypatch.setattr(module, "ENDS_AFTER", 2.0)
    hurried = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: time.sleep(seconds / 10)})
    monkeypatch.setattr(module, "time", hurried)


def write_other_lock(bucket: Bucket, **changes: object) -> None:
    """Puts the lock of another process there."""
    process = asdict(ProcessId.of_this_process())
    holder = {"token": "other", "count": 1, "time": time.time(), **process, "host": "elsewhere", **changes}
    bucket.write(".lock", json.dumps(holder).encode())


def test_a_second_process_is_refused_while_the_first_renews(bucket: Bucket) -> None:
    second = Lease(bucket)
    with Lease(bucket), pytest.raises(UserError, match=rf"in use by process {os.getpid()} on .*trainer\.id"):
        second.__enter__()
    with Lease(bucket):
        pass
    assert bucket.list() == []


def test_of_many_that_take_it_at_once_one_gets_it(bucket: Bucket) -> None:
    leases = [Lease(bucket) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(lambda lease: lease._try_acquire(), leases)) == [False] * 7 + [True]


def test_a_machine_that_is_gone_loses_it_when_its_time_is_over(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENDS_AFTER", 1.0)
    write_other_lock(bucket)
    messages: list[str] = []
    started = time.monotonic()
    with Lease(bucket, messages.append) as lease:
        assert time.monotonic() - started > 1
        lease.confirm()
    assert "waiting for process" in messages[0]


def test_a_dead_process_of_this_machine_loses_it_at_once(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENDS_AFTER", 60.0)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write_other_lock(bucket, pid=ended.pid, host=ProcessId.of_this_process().host)
    started = time.monotonic()
    with Lease(bucket):
        assert time.monotonic() - started < 30


@pytest.mark.parametrize("content", [b"{", b"[" * 100_000, b'{"time": "now", "pid": "7"}'])
def test_a_damaged_lock_holds_nobody_off(bucket: Bucket, content: bytes) -> None:
    bucket.write(".lock", content)
    with Lease(bucket) as lease:
        lease.confirm()


def test_who_lost_it_is_told_and_does_not_delete_that_of_the_other(bucket: Bucket) -> None:
    with Lease(bucket) as lease:
        lease.check()
        write_other_lock(bucket)
        deadline = time.monotonic() + HANG_SECONDS
        while lease._lost is None and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(MachineError, match=r"taken over by process .* on elsewhere"):
            lease.check()
    assert b"elsewhere" in (bucket.read(".lock") or b"")
