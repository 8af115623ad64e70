"""Locks of this machine, and processes that are known to have ended."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lm_trainer.core import file_lock
from lm_trainer.core.file_lock import is_locked, try_lock
from lm_trainer.core.process_id import ProcessId

THIS_PROCESS = ProcessId.of_this_process()


def test_a_lock_is_seen_without_being_taken(tmp_path: Path) -> None:
    assert not is_locked(tmp_path / "none")
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open() as second:
        assert not is_locked(tmp_path / "lock")
        assert try_lock(first.fileno())
        assert not try_lock(second.fileno())
        assert is_locked(tmp_path / "lock")
        first.close()
        assert try_lock(second.fileno())


def test_who_only_asks_keeps_nobody_from_taking_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open() as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        monkeypatch.setattr(file_lock.time, "sleep", lambda _: asking.close())
        assert try_lock(first.fileno())


def test_an_ended_process_is_known_even_before_it_is_waited_for() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        while Path(f"/proc/{child.pid}/stat").exists() and " Z " not in Path(f"/proc/{child.pid}/stat").read_text():
            time.sleep(0.01)
        assert ProcessId(THIS_PROCESS.host, child.pid).has_ended()
        assert ProcessId(THIS_PROCESS.host, child.pid, THIS_PROCESS.boot).has_ended()
    assert ProcessId(THIS_PROCESS.host, child.pid).has_ended()


@pytest.mark.parametrize("pid", [0, -1, 10**30])
def test_a_number_that_no_process_can_have(pid: int) -> None:
    assert ProcessId(THIS_PROCESS.host, pid).has_ended()


@pytest.mark.parametrize(
    "process",
    [THIS_PROCESS, ProcessId(socket.gethostname(), os.getppid()), ProcessId("elsewhere", 10**30)]
    + ([ProcessId(THIS_PROCESS.host, 10**30, "another start")] if THIS_PROCESS.boot else []),
    ids=["this", "its parent", "of another machine", "of another start"],
)
def test_others_count_as_running(process: ProcessId) -> None:
    assert not process.has_ended()


@pytest.mark.parametrize("record", [{}, {"host": "a"}, {"host": "a", "pid": "1"}, {"host": 1, "pid": 1}])
def test_a_record_that_names_no_process(record: dict[str, object]) -> None:
    assert ProcessId.from_record(record) is None
