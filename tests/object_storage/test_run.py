"""A run in a bucket: killed in any phase, resumed in an empty directory from the bucket alone, with equal numbers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lm_trainer.checkpoint import in_bucket, pins
from lm_trainer.core import bucket
from lm_trainer.core.bucket import Bucket
from lm_trainer.run.files import bucket_mirror
from tests.conftest import Outcome, Running, StartLmt, run_here
from tests.object_storage.proxy import PASSING, Proxy, inject_randomly, refuse
from tests.object_storage.servers import environment

STEPS = 40
pytestmark = pytest.mark.slow


class Runs(NamedTuple):
    """Attempts at one run, each in a directory of its own, as on machines that are taken away."""

    directory: Path
    base: Bucket
    endpoint: str
    start_lmt: StartLmt

    def start(self, machine: str, *overrides: str) -> Running:
        working_directory = self.directory / machine
        working_directory.mkdir(exist_ok=True)
        config, output = self.directory / "run.yaml", self.directory / f"{machine}.out"
        env = environment("s3", self.endpoint)
        return self.start_lmt("train", config, *overrides, cwd=working_directory, env=env, output=output)

    def read_output(self, machine: str) -> str:
        """Returns all that the processes on a machine have printed."""
        return (self.directory / f"{machine}.out").read_text()

    def run(self, machine: str, *overrides: str) -> Outcome:
        """Runs to the end in this process, where pauses between requests are short."""
        working_directory = self.directory / machine
        working_directory.mkdir(exist_ok=True)
        with contextlib.chdir(working_directory):
            return run_here("train", self.directory / "run.yaml", *overrides)

    def complete(self, machine: str, *overrides: str) -> str:
        done = self.run(machine, *overrides)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def metrics(self, machine: str) -> list[dict[str, Any]]:
        text = (self.directory / machine / "logs" / "run" / "metrics.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        # Which steps are saved between the permanent ones is decided by the clock.
        return [
            {key: row[key] for key in ("step", "train/loss", "fingerprint") if key in row}
            for row in rows
            if "fingerprint" not in row or row["step"] % 10 == 0
        ]


@pytest.fixture
def runs(behind: Bucket, proxy: Proxy, start_lmt: StartLmt, tmp_path: Path) -> Runs:
    text = " ".join(f"{word} {word * word}" for word in range(4000))
    (tmp_path / "train.txt").write_text(text)
    config = {
        # Each array is several requests to a server that takes milliseconds for one.
        "model": {
            "type": "llama",
            "seq_len": 32,
            "hidden_dim": 16,
            "intermediate_dim": 32,
            "num_layers": 1,
            "num_heads": 2,
            "num_kv_heads": 2,
        },
        "optimizer": {"type": "lion"},
        "data": {"tokenizer": "bytes", "num_workers": 0, "train_urls": [str(tmp_path / "train.txt")]},
        "trainer": {
            "id": "run",
            "train_batch_size": 8,
            "elastic_shards": 8,
            "max_devices": 1,
            "num_train_steps": STEPS,
            "sample_tokens": 0,
            "tracker": [],
            "log_jaxprs": False,
            "log_xla_hlo": False,
            "checkpointer": {"base_path": str(behind.parent), "save_interval": "50ms", "keep": [{"every": 10}]},
        },
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    return Runs(tmp_path, behind, proxy.endpoint, start_lmt)


def requests_reached(proxy: Proxy, method: str, part: str, count: int) -> Callable[[], bool]:
    """True once so many requests of a kind have come from now on."""
    start = len(proxy.requests)
    return lambda: sum(m == method and part in path for m, path in proxy.requests[start:]) >= count


PHASES = [
    *(("PUT", "/arrays/", count) for count in (3, 45)),
    *(("PUT", "/steps/", count) for count in (1, 2)),
    ("DELETE", "/steps/", 1),
    *(("DELETE", "/arrays/", count) for count in (1, 9)),
    ("PUT", "/run/metrics.jsonl", 2),
    ("PUT", "/.lock", 1),
]


def test_a_run_killed_in_every_phase_goes_on_in_empty_directories_to_the_same_numbers(runs: Runs, proxy: Proxy) -> None:
    runs.complete("undisturbed", f"trainer.checkpointer.base_path={runs.directory}/local")
    for number, (method, part, count) in enumerate(PHASES):
        reached = requests_reached(proxy, method, part, count)
        process = runs.start(f"machine-{number}", "trainer.steps_per_log=1")
        while process.poll() is None and not reached():
            time.sleep(0.001)
        process.kill()
        process.wait()
        shutil.rmtree(runs.directory / f"machine-{number}")
    proxy.fault = inject_randomly(PASSING, share=0.1)
    # Faults cost seconds each: here they meet the permanent steps alone, not a step for every 50 ms of the machine.
    output = runs.complete("last", "trainer.checkpointer.save_interval=1h", "trainer.max_devices=2")
    assert "resumed at step" in output
    assert runs.metrics("last") == runs.metrics("undisturbed")
    proxy.fault = None
    # Nothing is left of what was cut off, and another machine reads the same metrics.
    names = runs.base.list()
    assert {name.split("/")[1].split("-")[0] for name in names if name.startswith("arrays/")} == {
        "10",
        "20",
        "30",
        "40",
    }
    copied = (runs.base.read("run/metrics.jsonl") or b"").decode()
    assert copied == (runs.directory / "last" / "logs" / "run" / "metrics.jsonl").read_text()
    assert ".lock" not in names
    assert not any(b"a-secret-key" in (runs.base.read(name) or b"") for name in names if "arrays/" not in name)


@contextlib.contextmanager
def act_once(moment: Callable[[], bool], act: Callable[[], None]) -> Iterator[None]:
    """Does something as soon as it is the moment, while this process is busy inside."""
    over = threading.Event()

    def wait() -> None:
        while not moment():
            if over.wait(0.005):
                return
        act()

    waiting = threading.Thread(target=wait)
    waiting.start()
    try:
        yield
    finally:
        over.set()
        waiting.join()


def test_a_stop_signal_saves_and_a_server_that_fails_ends_the_run_at_the_next_step(
    runs: Runs, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with act_once(requests_reached(proxy, "PUT", "/steps/", 1), lambda: os.kill(os.getpid(), signal.SIGTERM)):
        stopped = runs.run("a", "trainer.num_train_steps=100000")
    assert stopped.returncode == 75, stopped.stderr[-2000:]
    assert "everything is saved" in stopped.stderr

    # What is only tried, so that no more is lost than must be, is given up sooner.
    monkeypatch.setattr(in_bucket, "_DELETE_SECONDS", 1.0)
    monkeypatch.setattr(pins, "_LIST_SECONDS", 1.0)
    monkeypatch.setattr(bucket, "_PROBE_SECONDS", 1.0)
    monkeypatch.setattr(bucket_mirror, "_LAST_SECONDS", 1.0)
    monkeypatch.setattr(bucket_mirror, "_PUSH_INTERVAL", 1000.0)
    with act_once(requests_reached(proxy, "PUT", "/steps/", 1), lambda: setattr(proxy, "fault", refuse(503))):
        failed = runs.run("b", "trainer.num_train_steps=100000", "trainer.checkpointer.retry_for=3s")
    proxy.fault = None
    assert failed.returncode == 1, failed.stderr[-2000:]
    assert "a checkpoint could not be written" in failed.stderr.splitlines()[-1]
    assert "Traceback" not in failed.stderr


def test_another_run_and_a_second_process_are_refused(runs: Runs, proxy: Proxy) -> None:
    flat = ("trainer.checkpointer.append_run_id_to_base_path=false", "trainer.num_train_steps=100000")
    saved = requests_reached(proxy, "PUT", "/steps/", 1)
    first = runs.start("a", *flat)
    while first.poll() is None and not saved():
        time.sleep(0.01)
    second = runs.run("b", *flat)
    assert second.returncode == 2, second.stderr
    assert "is in use by process" in second.stderr
    first.kill()
    first.wait()
    other = runs.run("c", *flat, "trainer.id=other")
    assert other.returncode == 2, other.stderr
    assert "holds the checkpoints of the run run" in other.stderr
