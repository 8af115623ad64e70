"""Processes that wait for others which do not come."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.health.signals import StopRequest
from lm_trainer.launch.supervise import find_free_address
from lm_trainer.parallel import connect
from lm_trainer.parallel.distributed import DistributedConfig
from tests.conftest import lmt_environment
from tests.core.forks import start_fork
from tests.hangs import HANG_SECONDS


@pytest.fixture
def nobody_comes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """JAX waits for as long as the test takes."""
    over = threading.Event()
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: over.wait())
    monkeypatch.setattr(connect, "NOTICE_AFTER", 0.1)
    monkeypatch.setattr(connect, "CONNECT_TIMEOUT", 0.3)
    yield
    over.set()


@pytest.fixture
def address() -> Iterator[str]:
    """An address at which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def started(address: str, process: int) -> tuple[list[str], str]:
    """Notes of a process while it waits, and the error with which it gives up."""
    messages: list[str] = []
    config = DistributedConfig(coordinator_address=address, num_processes=3, process_id=process)
    with pytest.raises(UserError) as refused:
        config.start(messages.append)
    return messages, str(refused.value)


@pytest.mark.usefixtures("nobody_comes")
@pytest.mark.parametrize("process", [0, 2])
def test_a_process_says_what_it_waits_for_and_gives_up(address: str, process: int) -> None:
    messages, error = started(address, process)
    assert messages == ["waiting up to 0 s for the other processes of the run"]
    assert "not all of them were there" in error
    assert error.endswith(f"check that all num_processes were started and can reach {address}")


@pytest.mark.usefixtures("nobody_comes")
def test_an_address_at_which_nobody_listens_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = f"127.0.0.1:{server.getsockname()[1]}"
    messages, error = started(free, 1)
    reason = f"nothing answers at {free} (Connection refused)"
    assert messages[0].endswith(reason)
    assert reason in error


@pytest.mark.usefixtures("nobody_comes")
def test_a_first_node_of_slurm_whose_name_does_not_resolve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"SLURM_JOB_ID": "812", "SLURM_STEP_NODELIST": "node[03-04]", "SLURM_NTASKS": "2"}
    for name, value in {**step, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)

    def unknown(*_: Any) -> socket.socket:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    messages: list[str] = []
    with pytest.raises(UserError) as refused:
        DistributedConfig().start(messages.append)
    reason = "nothing answers at node03:62252 (Name or service not known)"
    assert messages[0].endswith(reason)
    assert reason in str(refused.value)


def test_errors_of_jax_come_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: Any) -> None:
        raise RuntimeError("no such host\nat coordination.cc:1")

    monkeypatch.setattr(jax.distributed, "initialize", fails)
    messages, error = started("nohost:1", 1)
    assert messages == []
    assert "could not be connected (no such host);" in error


def connect_and_stop(number: int, address: str, written: Path) -> None:
    """Connects a run of one process, sends it a signal, and writes down what its loop would see."""
    with StopRequest() as stop:
        stop.arm()
        connect.connect_processes({"coordinator_address": address, "num_processes": 1, "process_id": 0}, print)
        signal.raise_signal(number)
        written.write_text(str(stop.requested))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_connected_process_hears_stop_signals(number: signal.Signals, tmp_path: Path) -> None:
    """JAX could replace the handlers when it connects."""
    written = tmp_path / "requested"
    process = start_fork(connect_and_stop, int(number), find_free_address(), written)
    process.join(HANG_SECONDS)
    assert written.read_text() == number.name


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_waits_for_others_can_be_stopped(number: signal.Signals, tmp_path: Path) -> None:
    program = (
        "from lm_trainer.parallel import connect; connect.NOTICE_AFTER = 0.5; "
        "import runpy; runpy.run_module('cli', run_name='__main__')"
    )
    settings = ("coordinator_address=127.0.0.1:0", "num_processes=2", "process_id=0")
    command = [sys.executable, "-c", program, "train", "gpt2_nano"]
    command += [f"trainer.distributed.{setting}" for setting in settings]
    with subprocess.Popen(
        command, cwd=tmp_path, env=lmt_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        while "waiting up to" not in (line := process.stdout.readline()):
            assert line, "it ended by itself"
        process.send_signal(number)
        assert f"stopped by {number.name} before the first step" in process.stdout.read()
        assert process.wait(timeout=HANG_SECONDS) == 75
