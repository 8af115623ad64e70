"""Faults that a run must survive or report: signals, locks, damaged and unsuitable checkpoints."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import pytest

from lm_trainer.core.errors import NonFiniteError, Preempted, UserError
from lm_trainer.health.signals import StopRequest
from lm_trainer.run.trainer import Trainer
from lm_trainer.run.weights.saved_state import save_state
from tests.conftest import lmt_environment
from tests.hangs import HANG_SECONDS
from tests.run.own_model import OPTIMIZER, Bigrams, loss, settings


@pytest.fixture(autouse=True)
def _run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_signal_before_there_is_anything_to_save_ends_the_run() -> None:
    with StopRequest(), pytest.raises(Preempted, match="stopped by SIGTERM before the first step"):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_the_second_ends_at_once(number: signal.Signals) -> None:
    """A repetition within moments is the same request: `timeout`, systemd and SLURM signal a process and its group."""
    program = f"""
import signal, time
from lm_trainer.health.signals import StopRequest
with StopRequest() as stop:
    stop.arm()
    signal.raise_signal({number:d})
    signal.raise_signal({number:d})
    time.sleep({1.1 if number == signal.SIGTERM else 0.2})
    print(stop.requested, flush=True)
    signal.raise_signal({number:d})
    print("still here", flush=True)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=lmt_environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (128 + number, f"{number.name}\n")
    assert f"{number.name}: stopping after this step; once more stops at once" in done.stderr


def test_a_second_signal_ends_a_process_that_is_inside_a_computation() -> None:
    # Python calls no handler meanwhile; the computation takes a minute.
    program = """
import hashlib
from lm_trainer.health.signals import StopRequest
with StopRequest() as stop:
    stop.arm()
    print("computing", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 200_000_000)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=lmt_environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=HANG_SECONDS) == 128 + signal.SIGINT


def test_a_signal_that_a_forked_process_gets_too_counts_once() -> None:
    program = """
import os, signal, sys, time
from lm_trainer.health.signals import StopRequest
with StopRequest() as stop:
    stop.arm()
    child = os.fork()
    if not child:
        print("forked", flush=True)
        while not stop.requested:
            time.sleep(0.01)
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.2)
    print(stop.requested)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, env=lmt_environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=HANG_SECONDS) == 0
        assert process.stdout.read() == "SIGINT\n"


def test_a_lock_ends_with_its_process_however_that_ends() -> None:
    Path("own").mkdir()
    program = """
import fcntl, time
file = open("own/.lock", "a+")
fcntl.flock(file, fcntl.LOCK_EX)
file.write("process 4242 on another-host")
file.flush()
print("held", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="own is in use by process 4242 on another-host; wait for it, stop it, or"):
            Trainer(settings(log_dir="."), OPTIMIZER, loss).__enter__()
        holder.kill()
        holder.wait()
    with Trainer(settings(log_dir="."), OPTIMIZER, loss):
        assert f"process {os.getpid()} on " in Path("own/.lock").read_text()


def test_a_file_system_without_locks_is_told_and_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with Trainer(settings(), OPTIMIZER, loss):
        pass
    assert "its file system has no locks (No locks available)" in caplog.text


@pytest.fixture
def _private() -> Iterator[None]:
    previous_mask = os.umask(0o077)
    yield
    os.umask(previous_mask)


@pytest.mark.usefixtures("_private")
def test_what_is_saved_and_what_is_read_of_what_was_saved(caplog: pytest.LogCaptureFixture) -> None:
    with Trainer(settings(), OPTIMIZER, loss) as trainer:
        state = trainer.initial_state(model_init=Bigrams)
        for step in (3, 6):
            save_state(trainer.store, state._replace(step=step), trainer.setup, {"data_fingerprint": ""})
        trainer.store.wait()
        spoilt = {**state.params, "table": state.params["table"].at[0, 0].set(jnp.inf)}
        with pytest.raises(NonFiniteError, match=r"after step 9 table is not finite.*\(there are: 3, 6\)"):
            save_state(trainer.store, state._replace(step=9, params=spoilt), trainer.setup, {})
        assert trainer.store.steps() == [3, 6]

    open_to_others = [path for path in Path().rglob("*") if path.stat().st_mode & 0o077]
    assert open_to_others == [], "files and directories of a run follow the umask"
    newest = Path("checkpoints/own/6")
    (newest / "_CHECKPOINT_METADATA").unlink()
    with Trainer(settings(id="other", load_checkpoint_path="checkpoints/own"), OPTIMIZER, loss) as trainer:
        assert trainer.initial_state(model_init=Bigrams).step == 3
    assert "the checkpoint of step 6 cannot be used" in caplog.text, "going back a step is said"
    assert newest.is_dir(), "what belongs to another run is not touched"
