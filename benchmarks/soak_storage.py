"""Interrupts a run with checkpoints in object storage, and compares the result with an undisturbed run.

    python benchmarks/soak_storage.py --out DIR --table benchmarks/results/soak_storage.md

An S3 server (moto) runs on loopback, behind a proxy that loses, delays, cuts and refuses a fraction of all requests. A
request of the run triggers each interruption: the n-th request that writes arrays, the record of a step, the copy of
the run directory or the lease, or that deletes a record or arrays. About every second attempt starts in an empty
directory, as on another machine. Exit code 0 means that every lap ended with the results of the undisturbed run,
interrupted saves and deletions left no files, and every attempt ended with the promised exit code.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.object_storage.proxy import PASSING, Proxy, inject_randomly, refuse, run_proxy  # noqa: E402
from tests.object_storage.servers import BUCKET, environment, run_s3_server, use_server  # noqa: E402

STEPS, SAVE_EVERY = 40, 10
PATIENCE = 300.0
"""Number of seconds after which an attempt that has neither ended nor reached the moment counts as a failure."""
MOMENTS = {
    "arrays are written": ("PUT", "/arrays/", 120),
    "a step's record is written": ("PUT", "/steps/", 4),
    "a step's record is deleted": ("DELETE", "/steps/", 3),
    "arrays are deleted": ("DELETE", "/arrays/", 60),
    "the run directory is copied": ("PUT", "/run/", 6),
    "the lease is written": ("PUT", "/.lock", 1),
    "anything is read": ("GET", "/", 60),
}
"""Method, part of the path and maximum index of the request of each moment, by name."""
ENDINGS = (*6 * ("kill -9",), *2 * ("SIGTERM",), "the server fails", "writing is denied")
OUTAGE = 20.0
"""Number of seconds after which an attempt with a failed server is killed. Reads are retried for two minutes."""
SHARES = (0.0, 0.03, 0.1)
"""Fractions of requests that have transient faults."""


def make_configuration(directory: Path, base: str) -> dict[str, Any]:
    text = " ".join(f"{word} {word * word}" for word in range(4000))
    (directory / "train.txt").write_text(text)
    return {
        "model": {"type": "gpt2", "seq_len": 32, "hidden_dim": 32, "num_layers": 2, "num_heads": 2, "resid_pdrop": 0.1},
        "data": {"tokenizer": "bytes", "num_workers": 0, "train_urls": [str(directory / "train.txt")]},
        "trainer": {
            "id": "run",
            "train_batch_size": 8,
            "elastic_shards": 8,
            "per_device_parallelism": 1,
            "num_train_steps": STEPS,
            "sample_tokens": 0,
            "tracker": [],
            "log_jaxprs": False,
            "log_xla_hlo": False,
            "cpu_threads": 1,
            "jax_compilation_cache_dir": str(directory / "compiled"),
            "jax_config": {"jax_persistent_cache_min_compile_time_secs": 0},
            "checkpointer": {"base_path": base, "save_interval": "50ms", "keep": [{"every": SAVE_EVERY}]},
        },
    }


class Soak:
    """The interruptions so far, and the run of the lap."""

    def __init__(self, out: Path, proxy: Proxy, seed: int):
        self.out, self.proxy, self.seed = out.absolute(), proxy, seed
        self.out.mkdir(parents=True, exist_ok=True)
        self.entries: list[dict[str, Any]] = []
        self.laps: list[dict[str, Any]] = []
        self.machines = 0
        self.undisturbed = self._run_undisturbed()

    @property
    def lap_url(self) -> str:
        return f"s3://{BUCKET}/seed-{self.seed}/lap-{len(self.laps) + 1}"

    def start(self, machine: str, devices: int, base: str, *overrides: str) -> subprocess.Popen[str]:
        directory = self.out / machine
        directory.mkdir(exist_ok=True)
        (self.out / "run.yaml").write_text(json.dumps(make_configuration(self.out, base)))
        flags = f"--xla_force_host_platform_device_count={devices}"
        env = {**os.environ, **environment("s3", self.proxy.endpoint), "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
        env |= {"LMT_PROGRESS": "plain", "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "cli", "train", str(self.out / "run.yaml"), *overrides]
        return subprocess.Popen(
            command, cwd=directory, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def read_results(self, machine: str) -> list[dict[str, Any]]:
        """Reads the losses of all steps, and the fingerprints of steps that are saved regardless of the clock."""
        lines = (self.out / machine / "logs/run/metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return [
            {key: row[key] for key in ("step", "train/loss", "optim/grad_norm", "fingerprint") if key in row}
            for row in rows
            if "train/loss" in row or row["step"] % SAVE_EVERY == 0
        ]

    def interrupt(self) -> None:
        number = len(self.entries)
        rng = random.Random(f"{self.seed}/{number}")
        moment, ending = list(MOMENTS)[number % len(MOMENTS)], rng.choice(ENDINGS)
        method, part, max_count = MOMENTS[moment]
        count, share, devices = rng.randint(1, max_count), rng.choice(SHARES), rng.choice((1, 1, 2, 4))
        if rng.random() < 0.5:
            shutil.rmtree(self.out / self.machine_name(), ignore_errors=True)
            self.machines += 1
        self.proxy.fault = inject_randomly(PASSING, share, seed=number) if share else None
        reached = self.make_request_condition(method, part, count)
        process = self.start(self.machine_name(), devices, self.lap_url, "trainer.checkpointer.retry_for=4s")
        began, problems = time.monotonic(), []
        while process.poll() is None and not reached() and time.monotonic() - began < PATIENCE:
            time.sleep(0.001)
        over = process.poll() is not None
        if not over:
            self.stop_process(process, ending)
        try:
            output = process.communicate(timeout=PATIENCE if ending in ("kill -9", "SIGTERM") else OUTAGE)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0]
        self.proxy.fault = None
        problems = (
            [] if over and process.returncode == 0 else self.find_broken_promises(process.returncode, ending, output)
        )
        entry = {"moment": moment, "ending": "none: it was over" if over else ending, "code": process.returncode}
        entry |= {"share": share, "devices": devices, "problems": problems}
        print(json.dumps(entry), flush=True)
        self.entries.append(entry)
        if over and process.returncode == 0:
            self.entries.pop()
            self.finish_lap()

    def stop_process(self, process: subprocess.Popen[str], ending: str) -> None:
        if ending in ("kill -9", "SIGTERM"):
            process.send_signal(signal.SIGKILL if ending == "kill -9" else signal.SIGTERM)
            return
        status = 503 if ending == "the server fails" else 403
        writes = ("PUT", "POST", "DELETE") if status == 403 else ("GET", "HEAD", "PUT", "POST", "DELETE")
        fault = refuse(status)
        self.proxy.fault = lambda handler: handler.command in writes and fault(handler)

    def find_broken_promises(self, code: int, ending: str, output: str) -> list[str]:
        # A server fault may end an attempt with a one-line message before the moment.
        # A run that is stopped in its last step is finished. A run that is stopped before its first step has nothing to
        # save.
        promised = {"kill -9": {-9}, "SIGTERM": {75, 0, -15}}.get(ending, {0, 1, 2, -9}) | {1, 2}
        problems = [] if code in promised else [f"exit code {code}"]
        if "Traceback" in output:
            problems.append(f"a traceback:\n{output[-3000:]}")
        return problems

    def machine_name(self) -> str:
        return f"machine-{self.machines}"

    def make_request_condition(self, method: str, part: str, count: int) -> Callable[[], bool]:
        """Makes a function that returns True after `count` more requests of a kind."""
        start = len(self.proxy.requests)
        return lambda: sum(m == method and part in path for m, path in self.proxy.requests[start:]) >= count

    def _run_undisturbed(self) -> list[dict[str, Any]]:
        shutil.rmtree(self.out / "undisturbed", ignore_errors=True)
        process = self.start("undisturbed", 1, str(self.out / "undisturbed" / "checkpoints"))
        output = process.communicate()[0]
        assert process.returncode == 0, output
        return self.read_results("undisturbed")

    def finish_lap(self) -> None:
        """Finishes the lap in an empty directory, from the bucket only, and compares the results."""
        machine = f"end-{len(self.laps)}"
        shutil.rmtree(self.out / machine, ignore_errors=True)
        process = self.start(machine, 1, self.lap_url)
        output = process.communicate()[0]
        problems = [] if process.returncode == 0 else [f"the last attempt failed:\n{output[-3000:]}"]
        if not problems and self.read_results(machine) != self.undisturbed:
            problems.append("numbers differ from the undisturbed run")
        with use_server("s3", self.proxy.endpoint):
            from lm_trainer.core.bucket import Bucket

            names = Bucket(f"{self.lap_url}/run").list()
        expected = {str(step) for step in range(SAVE_EVERY, STEPS + 1, SAVE_EVERY)}
        remaining = {name.split("/")[1].split("-")[0] for name in names if name.startswith("arrays/")}
        if remaining != expected:
            problems.append(f"arrays of steps {sorted(remaining)} are there")
        if ".lock" in names:
            problems.append("the lease is there")
        self.laps.append({"problems": problems})
        print(json.dumps({"lap": len(self.laps), "problems": problems}), flush=True)
        self.proxy.requests.clear()
        if not problems:
            shutil.rmtree(self.out / machine)
            shutil.rmtree(self.out / self.machine_name(), ignore_errors=True)
            self.machines += 1

    def collect_problems(self) -> list[str]:
        return [problem for entry in (*self.entries, *self.laps) for problem in entry["problems"]]


def table(soak: Soak, requests: int) -> str:
    """Formats the results as Markdown."""
    cells = Counter((entry["moment"], entry["ending"]) for entry in soak.entries)
    endings = sorted({ending for _, ending in cells})
    rows = [
        f"| {moment} | " + " | ".join(str(cells[moment, ending]) for ending in endings) + " |" for moment in MOMENTS
    ]
    codes = {ending: sorted({e["code"] for e in soak.entries if e["ending"] == ending}) for ending in endings}
    faults = Counter(entry["share"] for entry in soak.entries)
    shares = ", ".join(f"{share:.0%} of requests in {count}" for share, count in sorted(faults.items()))
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "tensorstore", "moto"))
    equal = sum(not lap["problems"] for lap in soak.laps)
    good = sum(not entry["problems"] for entry in soak.entries)
    return "\n".join(
        [
            "# Soak in object storage",
            "",
            f"`python benchmarks/soak_storage.py --seed {soak.seed} --interruptions {len(soak.entries)}`, "
            f"{platform.python_version()}, {packages}, 1, 2 and 4 emulated devices, S3 on loopback behind a proxy.",
            "",
            f"{len(soak.entries)} interruptions in {len(soak.laps)} laps of {STEPS} steps, {requests} requests: "
            f"{equal} of {len(soak.laps)} laps, ended in an empty directory from the bucket alone, had the losses, "
            f"gradient norms and fingerprints of the undisturbed run, and nothing was left of what was cut off. "
            f"{good} of {len(soak.entries)} attempts ended as promised, without a traceback.",
            "",
            "| interrupted when | " + " | ".join(endings) + " |",
            "|---|" + "---|" * len(endings),
            *rows,
            "| exit codes | " + " | ".join(", ".join(map(str, codes[ending])) for ending in endings) + " |",
            "",
            f"Faults that pass (lost, late, cut off, answered 429, 500 or 503) met {shares} of the attempts.",
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--interruptions", type=int, default=200)
    parser.add_argument("--table", type=Path, default=None, help="Markdown file for the results")
    chosen = parser.parse_args(arguments)
    with run_s3_server() as endpoint, run_proxy(endpoint) as proxy:
        soak, requests = Soak(chosen.out, proxy, chosen.seed), 0
        while len(soak.entries) < chosen.interruptions:
            requests_before = len(proxy.requests)
            soak.interrupt()
            requests += max(len(proxy.requests) - requests_before, 0)
        soak.finish_lap()
    text = table(soak, requests)
    print(text)
    for problem in soak.collect_problems():
        print(f"NOT AS PROMISED: {problem}")
    if chosen.table:
        chosen.table.parent.mkdir(parents=True, exist_ok=True)
        chosen.table.write_text(text)
    return 1 if soak.collect_problems() else 0


if __name__ == "__main__":
    sys.exit(main())
