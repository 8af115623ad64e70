"""The failure detector between processes that train nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from lm_trainer.launch.supervise import find_free_address
from tests.conftest import lmt_environment
from tests.hangs import HANG_SECONDS

PROCESS = """
import os, sys, time
from lm_trainer.health.peer_failure import join_processes
from lm_trainer.parallel.distributed import DistributedConfig
from lm_trainer.trackers import Progress

config = DistributedConfig(coordinator_address=sys.argv[1], num_processes=3, process_id=int(sys.argv[2]))
with join_processes(config, Progress(1, stream=open(os.devnull, "w"))):
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="suspends and kills processes")
def test_a_suspended_process_is_waited_for_and_a_killed_one_is_named() -> None:
    address = find_free_address()
    command = [sys.executable, "-c", PROCESS, address]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([*command, str(index)], env=lmt_environment(), stdout=pipe, stderr=pipe, text=True)
        for index in range(3)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert any("ready" in line for line in process.stdout)
        first, killed, other = processes
        os.kill(killed.pid, signal.SIGSTOP)
        # A process that is suspended keeps its connection, however long nothing is heard of it.
        time.sleep(2)
        assert [process.poll() for process in processes] == [None] * 3
        os.kill(killed.pid, signal.SIGKILL)
        for process in (first, other):
            _, errors = process.communicate(timeout=HANG_SECONDS)
            assert process.returncode == 1
            assert "error: process 1 of 3 (" in errors
            assert f"pid {killed.pid}) is gone: it was killed, or its machine was lost" in errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()
