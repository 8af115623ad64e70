"""Runs for `soak_world`: their commands, their results, and templates to start from."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.soak_shim import Fault, build_library, logging_environment

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.warm_lmt import WarmLmt, WarmProcess  # noqa: E402

STEPS, SAVE_EVERY = 12, 3
PATIENCE = 300.0
"""Number of seconds after which a running command counts as hanging."""
COMPARED = ("train/loss", "optim/grad_norm", "eval/loss")
# TensorStore leaves an empty `KEY.__lock` if it is killed, and reuses it when this key is next written.
_DRAFT_NAME = re.compile(r"\.tmp$|orbax-checkpoint-tmp|\.trash|\.incomplete$|\.replaced$|\.write-test")


def make_configuration(data: Path) -> dict[str, Any]:
    """Returns the configuration of a tiny run that writes every kind of file. As JSON, it is also valid YAML."""
    documents = [" ".join(f"{word} {word * word}" for word in range(7 * i, 7 * i + 60)) for i in range(120)]
    lines = [json.dumps({"text": document}) for document in documents]
    for name, part in {"train": lines[:100], "validation": lines[100:]}.items():
        (data / f"{name}.jsonl").write_text("\n".join(part) + "\n")
    checkpointer = {"save_interval": "1h", "keep": [{"every": SAVE_EVERY}]}
    trainer = {"id": "run", "train_batch_size": 8, "per_device_parallelism": 4, "num_train_steps": STEPS}
    trainer |= {"steps_per_eval": 6, "max_eval_batches": 2, "sample_tokens": 0, "token_probabilities": 0}
    trainer |= {"tracker": [], "log_jaxprs": False, "log_xla_hlo": False, "cpu_threads": 1}
    model = {"type": "gpt2", "seq_len": 32, "hidden_dim": 16, "num_layers": 1, "num_heads": 2, "resid_pdrop": 0.1}
    urls = {f"{name}_urls": [str(data / f"{name}.jsonl")] for name in ("train", "validation")}
    return {
        "model": {**model, "gradient_checkpointing": False},
        "data": {"tokenizer": "bytes", "num_workers": 0, "cache_dir": "cache", **urls},
        "trainer": {**trainer, "checkpointer": checkpointer},
        "optimizer": {"learning_rate": 3e-3, "warmup": 0.1},
        "hf_save_path": "exports",
        "hf_save_steps": 6,
    }


class Command:
    """A running or finished command."""

    def __init__(self, process: WarmProcess, output: Path):
        self._process, self._output, self.pid = process, output, process.pid

    def wait(self, seconds: float = PATIENCE) -> int:
        """Waits for the end, and returns the exit code, which is negative for a signal.

        Raises:
            AssertionError: if the command hangs.
        """
        try:
            return self._process.wait(seconds)
        except Exception:
            self.kill()
            raise AssertionError(f"hangs: no end after {seconds:.0f} s\n{self.text[-2000:]}") from None

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    @property
    def is_stopped(self) -> bool:
        """Returns True while a SIGSTOP stops the process."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False

    def wait_until_stopped(self) -> bool:
        """Waits for a SIGSTOP. Returns False if the process ended before it."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self.poll() is None:
            if self.is_stopped:
                return True
            time.sleep(0.02)
        return False

    @property
    def text(self) -> str:
        """Returns the output so far."""
        return self._output.read_text(errors="replace")


class World:
    """Environment of a soak: a directory, and a server process to fork, with JAX and the preloaded library."""

    def __init__(self, out: Path):
        self.out = out.absolute()
        self.lap = self.out / "lap"
        self.lap.mkdir(parents=True, exist_ok=True)
        self._data = self.out / "data"
        self._data.mkdir(exist_ok=True)
        self.config = self.out / "run.yaml"
        if not self.config.exists():
            self.config.write_text(json.dumps(make_configuration(self._data), indent=1))
        self.environment = {
            "JAX_COMPILATION_CACHE_DIR": str(self.out / "compiled"),
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "LD_PRELOAD": str(build_library(self.out)),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "LMT_PROGRESS": "plain",
            "COLUMNS": "200",
        }
        self._server = WarmLmt(self.environment)
        self._number = 0
        self.opened = contextlib.ExitStack()
        """Servers that are kept open for later laps."""
        self.cache: dict[Any, Any] = {}
        """Results and servers that laps share."""

    def close(self) -> None:
        self.opened.close()
        self._server.close()

    def start(
        self,
        *args: str,
        fault: Fault | None = None,
        directory: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Command:
        """Starts `lmt`. In `train` and `data` commands, CONFIG means `run.yaml`."""
        directory = directory or self.lap
        self._number += 1
        output = self.out / "outputs" / f"{self._number % 50}.txt"
        output.parent.mkdir(exist_ok=True)
        environment = {**self.environment, **(env or {})}
        if fault is not None:
            self.hits_file.unlink(missing_ok=True)
            environment |= fault.environment(directory, self.hits_file)
        command = [str(self.config) if arg == "CONFIG" else arg for arg in args]
        with output.open("wb") as stream:
            process = self._server.start(command, cwd=directory, env=environment, stdout=stream, stderr=stream)
        return Command(process, output)

    def run(self, *args: str, **options: Any) -> tuple[int, str]:
        """Runs `lmt` to its end. Returns the exit code and the output."""
        command = self.start(*args, **options)
        return command.wait(), command.text

    def run_and_log_calls(self, *args: str) -> Path:
        """Runs `lmt`. Returns the path of the log of its calls."""
        log = self.out / "calls.txt"
        log.unlink(missing_ok=True)
        code, text = self.run(*args, env=logging_environment(self.lap, log))
        assert code == 0, text
        return log

    @property
    def hits_file(self) -> Path:
        """Path of the log of calls with faults in the last command."""
        return self.out / "hits.txt"

    def read_hits(self) -> str:
        return self.hits_file.read_text().strip().replace("\t", " ") if self.hits_file.exists() else ""

    def reset_lap(self, template: str | None) -> None:
        """Resets the directory of the lap to a copy of a template, or to an empty directory."""
        shutil.rmtree(self.lap)
        if template is None:
            self.lap.mkdir()
        else:
            shutil.copytree(self.out / template, self.lap, symlinks=True)

    def save_template(self, template: str) -> None:
        """Saves the directory of the lap as a template."""
        shutil.rmtree(self.out / template, ignore_errors=True)
        shutil.copytree(self.lap, self.out / template, symlinks=True)


def committed_steps(directory: Path) -> list[int]:
    """Lists the committed steps of the run."""
    checkpoints = directory / "checkpoints" / "run"
    return (
        sorted(int(entry.name) for entry in checkpoints.iterdir() if entry.name.isdigit())
        if checkpoints.exists()
        else []
    )


def hash_results(directory: Path, run: str = "run") -> dict[str, Any]:
    """Hashes the results of a finished run that must equal those in an undisturbed run: {name: digest}."""
    lines = (directory / "logs" / run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_float=str) for line in lines]
    series = [(row["step"], key, row[key]) for row in rows for key in COMPARED if key in row]
    digests: dict[str, Any] = {"losses": _digest(repr(series).encode())}
    checkpoints = directory / "checkpoints" / run
    names = sorted((entry.name for entry in checkpoints.iterdir() if entry.name.isdigit()), key=int)
    for name in names:
        record = json.loads((checkpoints / name / "_CHECKPOINT_METADATA").read_text())
        digests[f"weights after step {name}"] = _digest(json.dumps(record["custom_metadata"]["digests"]).encode())
    for part in (f"exports/{run}", "cache"):
        for file in sorted((directory / part).rglob("*")):
            # The card of an export contains its date, and a manifest contains modification times of files.
            ignored = file.name in ("README.md", "manifest.json", "builder.json") or file.suffix == ".__lock"
            if file.is_file() and not ignored and not is_draft(file):
                digests[str(file.relative_to(directory)).replace(f"/{run}/", "/")] = _digest(file.read_bytes())
    return digests


def find_differences(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    return [name for name in sorted({*actual, *expected}) if actual.get(name) != expected.get(name)]


def is_draft(path: Path) -> bool:
    return bool(_DRAFT_NAME.search(path.name))


def draft_paths(directory: Path) -> list[str]:
    """Lists files and directories that a finished run should not leave behind."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if is_draft(path))


def process_settings(count: int) -> list[Sequence[str]]:
    """Returns the settings of each process of one run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    section = "trainer.distributed"
    address = f"{section}.coordinator_address=127.0.0.1:{port}"
    return [(address, f"{section}.num_processes={count}", f"{section}.process_id={index}") for index in range(count)]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
