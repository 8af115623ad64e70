"""Faults for `soak.py`. Each disturbs a run at some moment, and checks the behaviour promised for this case.

A fault is a function of the run's directories, its running attempt and a random generator. It asserts the promises, and
returns the exit code of the attempt (0 if the run finished before the moment).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.warm_lmt import WarmLmt  # noqa: E402

PATIENCE = 900.0
"""Number of seconds after which an attempt that has neither ended nor reached the moment counts as a failure."""
SAVE_EVERY = 40
"""Number of steps between permanent checkpoints."""
COMPARED = ("train/loss", "optim/grad_norm", "eval/loss")


def process_environment(devices: int, compiled: Path) -> dict[str, str]:
    """Returns the environment variables of a process.

    Args:
        devices: number of emulated devices.
        compiled: directory of compiled programs, unless the environment sets one.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        **os.environ,
        "PYTHONPATH": path,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "LMT_PROGRESS": "plain",
    }


class Attempt:
    """A training process, forked from a server process that has already imported JAX."""

    def __init__(self, lap: Lap, devices: int, max_file_bytes: int | None):
        self.lap = lap
        self.output = lap.directory / f"output-{time.time_ns()}.txt"
        with self.output.open("wb") as stream:
            self.process = lap.server.start(
                ["train", str(lap.config)],
                cwd=lap.directory,
                env=process_environment(devices, lap.config.parent / "compiled"),
                stdout=stream,
                stderr=stream,
            )
        if max_file_bytes is not None:
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
        self._began_at: int | None = None
        self._first_step = 0
        self._samples: list[tuple[int, int, int]] = []

    def read_output(self) -> str:
        return self.output.read_text(errors="replace")

    @property
    def is_training(self) -> bool:
        """Returns True after the log has been truncated to the checkpoint from which the attempt resumes."""
        if self._began_at is None and b"compiling the training step" in self.output.read_bytes():
            self._began_at, self._first_step = self.lap.count_lines(), self.lap.last_step()
        return self._began_at is not None

    def count_new_lines(self) -> int:
        return self.lap.count_lines() - (self._began_at or 0) if self.is_training else 0

    def wait_until(self, moment: Callable[[], bool]) -> bool:
        """Waits for the moment. Returns False if the run ended before it."""
        start, sampled = time.monotonic(), 0.0
        while self.process.poll() is None:
            if moment():
                return True
            timestamp = time.monotonic()
            assert timestamp - start < PATIENCE, (
                f"nothing came of it in {PATIENCE:.0f} s:\n{self.read_output()[-2000:]}"
            )
            if timestamp - sampled > 0.1:
                sampled = timestamp
                self._sample_usage()
            time.sleep(0.0005)
        return False

    def wait(self) -> int:
        """Waits for the process to end by itself."""
        self.wait_until(lambda: False)
        return self.process.wait()

    def send_and_wait(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.wait()

    def kill_and_wait(self) -> int:
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait()

    def _sample_usage(self) -> None:
        process = Path(f"/proc/{self.process.pid}")
        with contextlib.suppress(OSError, IndexError, ValueError):
            pages = int((process / "statm").read_text().split()[1])
            files = len(os.listdir(process / "fd"))
            if self.is_training and pages:
                self._samples.append((self.count_new_lines(), pages * os.sysconf("SC_PAGE_SIZE"), files))

    def measure(self) -> dict[str, Any]:
        """Measures memory in the second quarter of the steps, which is after compilation, and in the last quarter."""
        computed = self.lap.last_step() - self._first_step if self.is_training else 0
        measured: dict[str, Any] = {"computed": max(0, computed)}
        quarter = (self._samples[-1][0] if self._samples else 0) / 4
        early = [sample for sample in self._samples if quarter <= sample[0] <= 2 * quarter]
        late = [sample for sample in self._samples if sample[0] >= 3 * quarter]
        if quarter >= 5 and early and late:
            measured["memory"] = [median(sample[1] for sample in part) for part in (early, late)]
            measured["open_files"] = [max(sample[2] for sample in part) for part in (early, late)]
        return measured


class Lap:
    """A run from its first to its last step, over any number of attempts."""

    def __init__(self, directory: Path, config: Path, server: WarmLmt):
        self.directory, self.config, self.server = directory, config, server
        self.logs, self.checkpoints = directory / "logs" / "run", directory / "checkpoints" / "run"
        self.metrics = self.logs / "metrics.jsonl"

    def start(self, *, devices: int, fault: str = "", rng: random.Random | None = None) -> Attempt:
        self.directory.mkdir(exist_ok=True)
        max_file_bytes = None
        if fault == "full disk at a checkpoint":
            max_file_bytes = max([400_000, *(f.stat().st_size + 200_000 for f in self.logs.glob("*.json*"))])
        elif fault == "full disk at a line of metrics":
            largest = max([0, *(f.stat().st_size for f in self.logs.glob("*.json*"))])
            max_file_bytes = max(largest, 12_000) + (rng or random).randrange(2_000, 8_000)
        return Attempt(self, devices, max_file_bytes)

    def count_lines(self) -> int:
        return self.metrics.read_bytes().count(b"\n") if self.metrics.exists() else 0

    def last_step(self) -> int:
        with contextlib.suppress(OSError, IndexError, ValueError):
            return json.loads(self.metrics.read_bytes().splitlines()[-1])["step"]
        return 0

    def checkpoint_entries(self) -> list[str]:
        return os.listdir(self.checkpoints) if self.checkpoints.exists() else []

    def checkpoint_steps(self) -> list[int]:
        return sorted(int(name) for name in self.checkpoint_entries() if name.isdigit())

    def disk_bytes(self) -> int:
        """Counts the bytes of the run on disk, without the output of its attempts."""
        total = 0
        for part in (self.logs, self.checkpoints):
            for file in part.rglob("*"):
                with contextlib.suppress(OSError):
                    total += file.stat().st_size
        return total

    def read_result(self) -> dict[str, Any]:
        """Reads the results that must be equal: all numbers in the log as text, and the checksums of the last state."""
        rows = [json.loads(line, parse_float=str) for line in self.metrics.read_text().splitlines()]
        series = [(row["step"], key, row[key]) for row in rows for key in COMPARED if key in row]
        last = self.checkpoints / str(self.checkpoint_steps()[-1]) / "_CHECKPOINT_METADATA"
        digests = json.loads(last.read_text())["custom_metadata"]["digests"]
        return {
            "kept": [step for step in self.checkpoint_steps() if step % SAVE_EVERY == 0],
            "steps": sum("train/loss" in row for row in rows),
            "series": hashlib.sha256(repr(series).encode()).hexdigest()[:16],
            "weights": hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:16],
        }

    def seconds_per_step(self) -> float:
        rows = [json.loads(line) for line in self.metrics.read_text().splitlines()]
        return (rows[-1]["time"] - rows[0]["time"]) / (rows[-1]["step"] - rows[0]["step"])

    def find_unexpected_files(self) -> list[str]:
        """Lists files that a complete run should not leave behind."""
        allowed = {"config.yaml", "tokenizer", "run", ".lock"}
        names = [name for name in self.checkpoint_entries() if not name.isdigit() and name not in allowed]
        return [f"{name} was left behind" for name in names if not name.endswith(".corrupt")]


def wait_for_steps(attempt: Attempt, rng: random.Random, max_steps: int = 25) -> bool:
    """Waits for a few more steps."""
    target = rng.randrange(1, max_steps)
    return attempt.wait_until(lambda: attempt.count_new_lines() >= target)


def kill_when(moment: Callable[[Lap, Attempt], bool]) -> Callable[..., int]:
    def fault(lap: Lap, attempt: Attempt, rng: random.Random) -> int:
        if not attempt.wait_until(lambda: moment(lap, attempt)):
            return attempt.wait()
        return attempt.send_and_wait(signal.SIGKILL)

    return fault


def kill_in_step(lap: Lap, attempt: Attempt, rng: random.Random) -> int:
    return attempt.send_and_wait(signal.SIGKILL) if wait_for_steps(attempt, rng) else attempt.wait()


def stop_with_signal(number: signal.Signals) -> Callable[..., int]:
    def fault(lap: Lap, attempt: Attempt, rng: random.Random) -> int:
        if not wait_for_steps(attempt, rng):
            return attempt.wait()
        reached = lap.last_step()
        code = attempt.send_and_wait(number)
        assert code in (75, 0), f"ended with {code}, promised was 75:\n{attempt.read_output()[-2000:]}"
        assert lap.checkpoint_steps()[-1] >= reached, f"step {reached} was done, and {lap.checkpoint_steps()} are saved"
        return code

    return fault


def damage_checkpoint(spoil: Callable[[Path, random.Random], None]) -> Callable[..., int]:
    """Kills the run, damages its newest checkpoint, and checks that a restart reports it and uses the previous one."""

    def fault(lap: Lap, attempt: Attempt, rng: random.Random) -> int:
        if not attempt.wait_until(lambda: len(lap.checkpoint_steps()) > 1 and attempt.count_new_lines() > 2):
            return attempt.wait()
        attempt.send_and_wait(signal.SIGKILL)
        previous, spoilt = lap.checkpoint_steps()[-2:]
        spoil(lap.checkpoints / str(spoilt), rng)
        restarted = lap.start(devices=1)
        if restarted.wait_until(lambda: restarted.is_training):
            restarted.send_and_wait(signal.SIGKILL)
        output = restarted.read_output()
        assert f"checkpoint {spoilt} cannot be used" in output, output[-2000:]
        assert f"resumed at step {previous} of" in output, output[-2000:]
        shutil.rmtree(lap.checkpoints / f"{spoilt}.corrupt")
        return -signal.SIGKILL

    return fault


def largest_file(step: Path) -> Path:
    return max((file for file in step.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def flip_bit(step: Path, rng: random.Random) -> None:
    file = largest_file(step)
    content = bytearray(file.read_bytes())
    # The middle of the file contains large arrays. Both ends contain tables, in which a flipped bit can be harmless.
    content[rng.randrange(len(content) // 4, len(content) // 2)] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def truncate(step: Path, rng: random.Random) -> None:
    file = largest_file(step)
    os.truncate(file, rng.randrange(file.stat().st_size // 2))


def delete_half(step: Path, rng: random.Random) -> None:
    largest_file(step).unlink()


def corrupt_metadata(step: Path, rng: random.Random) -> None:
    file = step / "_CHECKPOINT_METADATA"
    file.write_text(file.read_text().replace("timestamp", "timesuamp"))


def append_torn_metrics_line(lap: Lap, attempt: Attempt, rng: random.Random) -> int:
    """Leaves an incomplete line, as a power failure can."""
    code = kill_in_step(lap, attempt, rng)
    if code:
        with lap.metrics.open("ab") as file:
            file.write(b'{"step": 7, "train/lo')
    return code


def expect_full_disk_error(lap: Lap, attempt: Attempt, rng: random.Random) -> int:
    code = attempt.wait()
    output = attempt.read_output()
    if code:
        assert code == 1, f"ended with {code}, promised was 1:\n{output[-2000:]}"
        assert "Traceback" not in output, output[-3000:]
        assert "cannot be written" in output or "could not be written" in output or "too large" in output, output[
            -2000:
        ]
    return code


@contextlib.contextmanager
def made_read_only(directory: Path) -> Iterator[bool]:
    """Makes a directory read-only, even for root, who ignores modes. Yields False if mounts are not allowed."""
    if os.geteuid():
        mode = directory.stat().st_mode
        directory.chmod(0o555)
        yield True
        directory.chmod(mode)
        return
    mount_point = str(directory)
    if subprocess.run(["mount", "--bind", mount_point, mount_point], capture_output=True, check=False).returncode:
        yield False
        return
    subprocess.run(["mount", "-o", "remount,ro,bind", mount_point], check=True)
    try:
        yield True
    finally:
        subprocess.run(["umount", "-l", mount_point], check=True)


def restart_in_read_only_directory(lap: Lap, attempt: Attempt, rng: random.Random) -> int:
    code = kill_in_step(lap, attempt, rng)
    with made_read_only(lap.logs) as mounted:
        if mounted:
            restarted = lap.start(devices=1)
            assert restarted.wait() == 2, restarted.read_output()[-2000:]
            assert "cannot be written" in restarted.read_output(), restarted.read_output()[-2000:]
            assert "Traceback" not in restarted.read_output(), restarted.read_output()[-2000:]
    return code


def stop_and_continue(lap: Lap, attempt: Attempt, rng: random.Random) -> int:
    for _ in range(3):
        if not wait_for_steps(attempt, rng, 8):
            return attempt.wait()
        attempt.process.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        attempt.process.send_signal(signal.SIGCONT)
        lines = attempt.count_new_lines()
        attempt.wait_until(lambda: attempt.count_new_lines() > lines)  # noqa: B023
    return attempt.send_and_wait(signal.SIGKILL) if attempt.process.poll() is None else attempt.wait()


def start_second_process(lap: Lap, attempt: Attempt, rng: random.Random) -> int:
    if not wait_for_steps(attempt, rng, 4):
        return attempt.wait()
    attempt.process.send_signal(signal.SIGSTOP)
    second = lap.start(devices=1)
    code = second.wait()
    attempt.process.send_signal(signal.SIGCONT)
    assert code == 2, f"the second ended with {code}:\n{second.read_output()[-2000:]}"
    assert f"is in use by process {attempt.process.pid}" in second.read_output(), second.read_output()[-2000:]
    return attempt.send_and_wait(signal.SIGKILL)


def is_saving(lap: Lap, attempt: Attempt) -> bool:
    return attempt.is_training and any("orbax-checkpoint-tmp" in name for name in lap.checkpoint_entries())


def is_deleting(lap: Lap, attempt: Attempt) -> bool:
    return attempt.is_training and any(name.startswith(".trash") for name in lap.checkpoint_entries())


FATAL: dict[str, Callable[..., int]] = {
    "kill -9 at the start": kill_when(lambda lap, attempt: b"run run, in" in attempt.output.read_bytes()),
    "kill -9 while compiling": kill_when(lambda lap, attempt: attempt.is_training),
    "kill -9 in a step": kill_in_step,
    "kill -9 in a save": kill_when(is_saving),
    "kill -9 in a deletion": kill_when(is_deleting),
    "SIGTERM": stop_with_signal(signal.SIGTERM),
    "SIGINT": stop_with_signal(signal.SIGINT),
    "flipped bit in a checkpoint": damage_checkpoint(flip_bit),
    "truncated checkpoint": damage_checkpoint(truncate),
    "half-deleted checkpoint": damage_checkpoint(delete_half),
    "spoilt metadata of a checkpoint": damage_checkpoint(corrupt_metadata),
    "torn line of metrics": append_torn_metrics_line,
    "full disk at a checkpoint": expect_full_disk_error,
    "full disk at a line of metrics": expect_full_disk_error,
    "read-only run directory": restart_in_read_only_directory,
}
MILD: dict[str, Callable[..., int]] = {
    "stopped and continued": stop_and_continue,
    "second process on the run": start_second_process,
}
CI = (
    "kill -9 while compiling",
    "kill -9 in a save",
    "flipped bit in a checkpoint",
    "kill -9 in a deletion",
    "SIGTERM",
)
