"""Checks for leaks in a long run with many saves, and in many runs in one process and one directory.

    python -m benchmarks.growth --table benchmarks/results/2-core-epyc/growth.md

Memory, open files and threads are read from /proc (Linux) between the end of compilation and the end of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.setting import LMT, describe_load, describe_setting, markdown_table
from lm_trainer.run.files.listing import read_last_step_and_loss

STEPS, SAVE_EVERY, RUNS = 3000, 10, 300


class Usage(NamedTuple):
    """Resources that a process uses."""

    memory_mb: float
    """Resident memory in MB."""
    files: int
    threads: int

    @classmethod
    def read_of_process(cls, pid: int) -> Usage:
        """Reads the usage of a running process."""
        process = Path(f"/proc/{pid}")
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        kilobytes = int(status["VmRSS"].split()[0])
        return cls(kilobytes / 1000, len(list((process / "fd").iterdir())), int(status["Threads"]))

    def cells(self) -> list[str]:
        return [f"{self.memory_mb:.0f} MB", str(self.files), str(self.threads)]


def write_config(directory: Path, steps: int, save_every: int) -> Path:
    """Writes a configuration of a tiny model on the language reference included with Python, as JSON (valid YAML)."""
    (directory / "train.txt").write_text("\n".join(pydoc_data.topics.topics.values()), encoding="utf-8")
    model = {"type": "gpt2", "seq_len": 32, "hidden_dim": 32, "num_layers": 1, "num_heads": 2}
    checkpointer = {"save_interval": "1h", "keep": [{"every": save_every}]}
    trainer = {"id": "run", "train_batch_size": 8, "elastic_shards": 2, "num_train_steps": steps, "steps_per_log": 1}
    trainer |= {"sample_tokens": 0, "token_probabilities": 0, "checkpointer": checkpointer}
    data = {"tokenizer": "bytes", "num_workers": 0, "train_urls": [str(directory / "train.txt")]}
    data |= {"cache_dir": str(directory / "cache")}
    config = directory / "run.yaml"
    config.write_text(json.dumps({"model": model, "data": data, "trainer": trainer}))
    return config


def measure_long_run(directory: Path, steps: int) -> list[list[str]]:
    """Trains one run in a new process. Returns one row for each sixth of the run."""
    config = write_config(directory, steps, SAVE_EVERY)
    metrics, rows = directory / "logs/run/metrics.jsonl", []
    marks = [steps * part // 6 for part in range(1, 6)]
    with (directory / "out.txt").open("wb") as output:
        process = subprocess.Popen([*LMT, "train", str(config)], cwd=directory, stdout=output, stderr=output)
        previous = time.monotonic(), 0
        while process.poll() is None:
            step = read_last_step_and_loss(metrics)[0]
            if marks and step >= marks[0]:
                usage, timestamp = Usage.read_of_process(process.pid), time.monotonic()
                rows.append(
                    [
                        f"step {step}",
                        *usage.cells(),
                        f"{1000 * (timestamp - previous[0]) / (step - previous[1]):.1f} ms",
                    ]
                )
                previous = timestamp, step
                while marks and step >= marks[0]:
                    marks.pop(0)
            time.sleep(0.1)
    assert process.returncode == 0, (directory / "out.txt").read_text()[-2000:]
    return rows


def measure_many_runs(directory: Path, config: Path, count: int) -> list[list[str]]:
    """Trains runs of a configuration one after another in this process. Returns rows for some of the runs."""
    from lm_trainer.config.loader import load as load_config
    from lm_trainer.run.config.run_config import RunConfig
    from lm_trainer.run.train import train
    from lm_trainer.trackers import Progress

    rows = []
    marks = sorted({2, count // 30, count // 6, count // 3, 2 * count // 3, count})
    original_directory = os.getcwd()
    os.chdir(directory)
    try:
        for number in range(1, count + 1):
            began = time.perf_counter()
            run = load_config(config, [f"trainer.id=run-{number}"], RunConfig).config
            with open(os.devnull, "w") as nowhere, Progress(2, stream=nowhere) as progress:
                train(run, name="run", progress=progress)
            seconds = time.perf_counter() - began
            if number in marks:
                rows.append([f"run {number}", *Usage.read_of_process(os.getpid()).cells(), f"{seconds:.2f} s"])
    finally:
        os.chdir(original_directory)
    return rows


def measure_start_seconds(directory: Path, name: str) -> float:
    """Measures the duration of a two-step run in a new process, from the start of the command to its end."""
    began = time.perf_counter()
    command = [*LMT, "train", str(directory / "run.yaml"), f"trainer.id={name}"]
    subprocess.run(command, cwd=directory, check=True, capture_output=True)
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of the long run; {STEPS}")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"runs in one directory; {RUNS}")
    parser.add_argument("--table", type=Path, help="the Markdown file to write")
    options = parser.parse_args(arguments)
    heads = ["", "memory", "open files", "threads", "time"]
    text = [f"# What grows\n\n{describe_setting('jax', 'orbax-checkpoint', 'grain')}"]
    with tempfile.TemporaryDirectory() as name:
        rows = measure_long_run(Path(name), options.steps)
        saves = options.steps // SAVE_EVERY
        text.append(f"One run of {options.steps:,} steps with {saves} permanent checkpoints; time is that of a step:")
        text.append(markdown_table(heads, rows))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        config = write_config(directory, 2, SAVE_EVERY)
        first = [measure_start_seconds(directory, f"first-{number}") for number in range(4)][1:]
        rows = measure_many_runs(directory, config, options.runs)
        last = [measure_start_seconds(directory, f"last-{number}") for number in range(3)]
        began = time.perf_counter()
        subprocess.run([*LMT, "runs"], cwd=directory, check=True, capture_output=True)
        listing = time.perf_counter() - began
        text.append(f"{options.runs} runs of two steps in one process and one directory; time is that of a run:")
        text.append(markdown_table(heads, rows))
        text.append(
            f"A run in a new process took {sorted(first)[1]:.1f} s before and {sorted(last)[1]:.1f} s after them "
            f"(medians of 3); `lmt runs` then takes {listing:.1f} s."
        )
    text.append(describe_load())
    print("\n\n".join(text))
    if options.table:
        options.table.write_text("\n\n".join(text) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
