"""Times a run with an empty cache up to its first batch, and up to the end of its first step.

    python -m benchmarks.first_batch

The text is the embedded corpus, repeated several times as JSON lines, so that building the complete cache takes much
longer than the first batch. Each round is a new process that tokenises with a previously trained tokenizer. Times are
wall time since the start of `open_data`, and processor seconds of this process and its workers since then. If these are
far apart, the machine was busy with other work.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.setting import describe_load, describe_setting, markdown_table

MARKS = {
    "open_s": "seconds until the data are open",
    "open_cpu_s": "the same in CPU seconds",
    "first_batch_s": "seconds until the first batch",
    "first_batch_cpu_s": "the same in CPU seconds",
    "first_step_s": "seconds until the first step is done, compiled meanwhile",
    "first_step_cpu_s": "the same in CPU seconds",
    "tokens_at_first_batch": "tokens in the cache at the first batch",
    "complete_at_first_batch": "whether that is all",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--copies", type=int, default=6, help="number of copies of the 12 MB corpus")
    parser.add_argument("--shuffle", default="era", choices=["era", "none", "full"])
    parser.add_argument("--backend", default="tokenizers", choices=["tokenizers", "fastokens"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_once(Path(options.one), options.shuffle, options.backend)))
        return
    with tempfile.TemporaryDirectory() as directory:
        write_corpus(Path(directory), options.copies)
        command = [sys.executable, "-m", "benchmarks.first_batch", "--one", directory]
        command += ["--shuffle", options.shuffle, "--backend", options.backend]
        rounds = [
            json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(options.rounds)
        ]
    if options.json:
        print(json.dumps({"shuffle": options.shuffle, "backend": options.backend, "rounds": rounds}))
    else:
        print(report(options, rounds))


def report(options: argparse.Namespace, rounds: list[dict[str, Any]]) -> str:
    rows = []
    for name, label in MARKS.items():
        values = [result[name] for result in rounds]
        rows.append([label, f"{statistics.median(values):,}", ", ".join(f"{value:,}" for value in values)])
    description = f"{12 * options.copies} MB of JSON lines, shuffle: {options.shuffle}, backend: {options.backend}."
    versions = describe_setting("jax", "grain", "tokenizers", "fastokens")
    return (
        f"# From an empty cache to the first batch\n\n{versions} {description} {describe_load()}\n\n"
        + markdown_table(["", "median", "all"], rows)
    )


def write_corpus(directory: Path, copies: int) -> None:
    """Writes `copies` files of about 12 MB each, and a tokenizer."""
    from lm_trainer.data.sources import Row
    from lm_trainer.data.sources.embedded import Embedded
    from lm_trainer.data.tokenizer import TrainedBpe, train_bpe

    shards = Embedded().shards("train")
    texts = [row.text for shard in shards for row in shard.rows() if isinstance(row, Row)]
    for copy in range(copies):
        with (directory / f"{copy}.jsonl").open("w") as file:
            file.writelines(json.dumps({"text": f"# {copy}\n{text}"}) + "\n" for text in texts)
    train_bpe(TrainedBpe(vocab_size=8192, sample_bytes=4 << 20), shards).save(directory / "tokenizer")


def run_once(directory: Path, shuffle: str, backend: str) -> dict[str, Any]:
    from lm_trainer.data.pipeline import open_data
    from lm_trainer.run.build.setup import build_setup
    from lm_trainer.run.config.run_config import RunConfig

    config = RunConfig.model_validate(
        {
            "model": {"type": "gpt2", "seq_len": 256, "hidden_dim": 64, "num_layers": 2, "num_heads": 2},
            "trainer": {"train_batch_size": 16},
            "data": {
                "train_urls": f"{directory}/*.jsonl",
                "tokenizer": f"{directory}/tokenizer",
                "tokenizer_backend": backend,
                "shuffle": {"type": shuffle},
            },
        }
    )
    marks: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        start = (time.monotonic(), cpu_seconds())
        data = open_data(config.data.model_copy(update={"cache_dir": cache}), seq_len=256, seed=0, background=True)
        marks |= seconds_since(start, "open")
        batch = next(data.train(16, rows=range(16), num_steps=1))
        marks |= seconds_since(start, "first_batch")
        marks |= {"tokens_at_first_batch": data.num_train_tokens, "complete_at_first_batch": int(data.complete)}
        setup = build_setup(config, data.tokenizer.vocab_size)
        setup.step.compile(batch)
        _, metrics = setup.step(setup.init(), setup.step.put(batch), 1e-3)
        assert float(metrics["loss"]) > 0
        marks |= seconds_since(start, "first_step")
        data.close()
    return marks


def seconds_since(start: tuple[float, float], name: str) -> dict[str, float]:
    wall, cpu = time.monotonic() - start[0], cpu_seconds() - start[1]
    return {f"{name}_s": round(wall, 2), f"{name}_cpu_s": round(cpu, 2)}


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and its workers, on Linux including workers that are still running."""
    total = sum(os.times()[:4])
    for worker in multiprocessing.active_children():
        stat = Path(f"/proc/{worker.pid}/stat")
        if stat.exists():
            fields = stat.read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


if __name__ == "__main__":
    main()
