"""Processes of a run on this machine: their output, their ends, and the signals between them. They train nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.launch.local import Nodes, launch_local, process_environments, visible_gpus
from lm_trainer.launch.supervise import End, LocalProcess, Status, describe_exit, supervise
from tests.conftest import ROOT, lmt_environment

# Far longer than a test lasts: these processes end by what is done to them or not at all.
WAIT = "import time; print('ready', flush=True); time.sleep(600)"
OBEDIENT = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n" + WAIT
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT


def run(*programs: str, grace_period: float = 0.2) -> tuple[int, list[str]]:
    lines: list[str] = []
    processes = [LocalProcess([sys.executable, "-c", program], os.environ, os.getcwd()) for program in programs]
    return supervise(processes, lines.append, grace_period=grace_period).code, lines


def test_output_carries_the_number_of_its_process() -> None:
    code, lines = run("print('a'); print('b')", "import sys; print('c'); sys.stderr.write('no newline')")
    assert code == 0
    assert [line for line in lines if line.startswith("[0]")] == ["[0] a", "[0] b"]
    assert sorted(line for line in lines if line.startswith("[1]")) == ["[1] c", "[1] no newline"]


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [("raise SystemExit(3)", 3, "failed with exit code 3"), ("import os; os.kill(os.getpid(), 9)", 137, "SIGKILL")],
)
def test_the_first_that_fails_is_named_and_takes_the_others_down(program: str, code: int, words: str) -> None:
    exit_code, lines = run(OBEDIENT, program, STUBBORN)
    assert exit_code == code
    named = [line for line in lines if line.startswith("process ")]
    assert len(named) == 1
    assert "process 1 of 3 (pid " in named[0]
    assert words in named[0]
    assert "sending SIGTERM to process 0, 2" in lines
    assert "sending SIGKILL to process 2" in lines


def test_others_that_end_by_themselves_are_left_alone() -> None:
    # The other one outlives the failure, and ends long before it would be told to.
    code, lines = run("raise SystemExit(1)", "import time; time.sleep(0.5)", grace_period=60)
    assert code == 1
    assert not [line for line in lines if line.startswith("sending")]


class FakeProcess:
    """A member whose end is seen at the given poll."""

    location = "somewhere"

    def __init__(self, code: int, polls: int):
        self._code, self._left = code, polls
        self.received: list[int] = []

    def poll(self) -> Status:
        self._left -= 1
        return Status([], self._code if self._left <= 0 else None)

    def send_signal(self, number: int) -> None:
        self.received.append(number)


@pytest.mark.parametrize("polls", [1, 3])
def test_a_killed_one_is_the_cause_though_the_failure_it_led_to_is_seen_first(polls: int) -> None:
    lines: list[str] = []
    processes = [FakeProcess(1, polls=1), FakeProcess(-signal.SIGKILL, polls=polls)]
    assert supervise(processes, lines.append, grace_period=60) == End(137, lost=frozenset([1]))
    assert lines == [
        "process 0 of 2 (somewhere) failed with exit code 1",
        "process 1 of 2 (somewhere) was killed by SIGKILL",
    ]


def test_one_that_was_told_to_end_is_not_the_cause() -> None:
    lines: list[str] = []
    terminated = FakeProcess(-signal.SIGTERM, polls=4)
    assert supervise([FakeProcess(1, polls=1), terminated], lines.append, grace_period=0.0) == End(1)
    assert terminated.received[0] == signal.SIGTERM
    assert sum(line.startswith("process ") for line in lines) == 1


def test_one_that_aborts_without_its_coordinator_is_not_lost() -> None:
    processes = [FakeProcess(-signal.SIGKILL, polls=1), FakeProcess(-signal.SIGABRT, polls=2)]
    assert supervise(processes, lambda _: None).lost == {0}


KILLS_THE_LAST = """
import os, sys
settings = dict(argument.split("=", 1) for argument in sys.argv[1:])
index, count = (int(settings.get(f"trainer.distributed.{key}", 1)) for key in ("process_id", "num_processes"))
print(os.environ["CUDA_VISIBLE_DEVICES"], "of", count, flush=True)
if count > 1:
    os.kill(os.getpid(), 9) if index == count - 1 else sys.exit(1)
"""


@pytest.mark.parametrize(("restarts", "code"), [(0, 137), (1, 137), (2, 0), (9, 0)])
def test_a_run_starts_again_without_the_processes_that_were_killed(restarts: int, code: int) -> None:
    lines: list[str] = []
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "4,5,6"}
    environ.pop("JAX_PLATFORMS", None)
    program = ["-c", KILLS_THE_LAST]
    nodes = Nodes(restarts=restarts)
    assert launch_local(program, 3, devices_per_process=None, write=lines.append, nodes=nodes, environ=environ) == code
    attempts = min(restarts, 2) + 1
    assert sorted(line for line in lines if " of " in line and line.startswith("[")) == sorted(
        f"[{index}] {4 + index} of {count}" for count in (3, 2, 1)[:attempts] for index in range(count)
    )
    again = [line for line in lines if line.startswith("starting")]
    assert again == [f"starting again with the {n} of {n + 1} processes that are left" for n in (2, 1)][: attempts - 1]


def test_each_machine_starts_its_own_processes_of_one_run() -> None:
    lines: list[str] = []
    program = ["-c", "import sys; print(*(text.partition('.distributed.')[2] for text in sys.argv[1:]))"]
    nodes = Nodes(3, 1, "first:8476")
    assert launch_local(program, 2, devices_per_process=1, write=lines.append, nodes=nodes) == 0
    assert sorted(lines) == [
        f"[{index}] coordinator_address=first:8476 num_processes=6 process_id={index}" for index in (2, 3)
    ]
    with pytest.raises(UserError, match="the 3 nodes have the numbers 0 to 2"):
        Nodes(3, 3, "first:8476")
    with pytest.raises(UserError, match="--nodes needs --coordinator HOST:PORT"):
        Nodes(2)
    with pytest.raises(UserError, match="--restarts is for one machine"):
        Nodes(2, 0, "first:8476", restarts=1)


def test_a_stop_is_no_failure() -> None:
    assert run("raise SystemExit(75)", "import time; time.sleep(0.3)") == (75, [])
    assert run("raise SystemExit(76)", "raise SystemExit(76)") == (76, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_reaches_every_process_once(tmp_path: Path, number: signal.Signals) -> None:
    # Each lives on for a while after its signal, so that a second one would be printed too.
    counting = f"""
import signal, sys, time
def note(number, frame):
    print("signal", number, flush=True)
    time.sleep(0.5)
    sys.exit(75)
signal.signal({number}, note)
print("ready", flush=True)
time.sleep(600)
"""
    lines: list[str] = []

    def write(line: str) -> None:
        lines.append(line)
        if sum(line.endswith("ready") for line in lines) == 2 and line.endswith("ready"):
            signal.raise_signal(number)

    processes = [LocalProcess([sys.executable, "-c", counting], os.environ, str(tmp_path)) for _ in range(2)]
    handler = signal.getsignal(number)
    assert supervise(processes, write) == End(75, interrupted=True)
    assert sorted(line for line in lines if "signal" in line) == [f"[{index}] signal {number}" for index in (0, 1)]
    assert signal.getsignal(number) is handler


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's death is one of Linux")
def test_processes_are_asked_to_stop_when_their_parent_dies(tmp_path: Path) -> None:
    done = tmp_path / "done"
    program = OBEDIENT.replace("sys.exit(75)", f"(open({str(done)!r}, 'w'), sys.exit())")
    parent = f"""
import os, sys
from lm_trainer.launch.supervise import LocalProcess, supervise
process = LocalProcess([sys.executable, "-c", {program!r}], os.environ, os.getcwd())
supervise([process], lambda line: print(line, flush=True))
"""
    process = subprocess.Popen([sys.executable, "-c", parent], env=lmt_environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout as output:
        assert output.readline() == "[0] ready\n"
        process.kill()
    waiting = threading.Event()
    for _ in range(600):
        if done.exists():
            break
        waiting.wait(0.1)
    assert done.exists()


def test_gpus_are_shared_out(tmp_path: Path) -> None:
    shared = process_environments({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 2, None)
    assert [e["CUDA_VISIBLE_DEVICES"] for e in shared] == ["4,5", "6,7"]
    with pytest.raises(UserError, match=r"3 processes cannot share 4 GPUs \(0, 1, 2, 3\) equally"):
        process_environments({}, 3, None, gpus=["0", "1", "2", "3"])
    on_cpu = process_environments({"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cpu"}, 2, None)
    assert [e["CUDA_VISIBLE_DEVICES"] for e in on_cpu] == ["0", "0"]
    for name in ("nvidia1", "nvidia0", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1", "10"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == []


@pytest.mark.slow
def test_emulated_devices_are_those_that_jax_sees() -> None:
    environ = process_environments(lmt_environment(devices=8), 2, 3)[1]
    program = "import jax; print(jax.local_device_count(), jax.devices()[0].platform)"
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "cpu"]


def test_how_ends_are_described() -> None:
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(-99) == "was killed by signal 99"
    assert describe_exit(2) == "failed with exit code 2"


def test_modules_run_as_the_command_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lm_trainer", "--version"],
        cwd=ROOT,
        env=lmt_environment(),
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("lmt ")
