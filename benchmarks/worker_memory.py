"""Measures the memory of a training process and its Grain worker processes over very many small batches.

    python -m benchmarks.worker_memory

Rows are tiny, so that as many batches as possible fit into the time, and a leak in each batch adds up. Reports, at even
intervals, the resident memory of the process and of its workers, and the number of shared memory segments on this
machine, which transfer the batches. The first line is measured after the start, when buffers are full.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.setting import describe_load, describe_setting, markdown_table

SEQ, ROWS = 16, 2
_START_SECONDS = 15.0


class Memory(NamedTuple):
    """Resident memory in MiB, and number of shared memory segments on this machine."""

    process: float
    workers: list[float]
    segments: int


def make_pipeline() -> Any:
    """Makes a pipeline of endless rows of numbers in pure Python."""
    import grain
    import numpy as np

    return grain.MapDataset.range(1 << 20).repeat().map(lambda i: {"tokens": (np.arange(SEQ + 1) + int(i)) % 250})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=1_000_000, help="maximum number of batches")
    parser.add_argument("--minutes", type=float, default=5, help="maximum time")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--lines", type=int, default=10)
    chosen = parser.parse_args()
    from lm_trainer.data import DataConfig, open_data

    source = {"type": "grain", "factory": f"{Path(__file__).resolve()}:make_pipeline", "elements": "rows"}
    with tempfile.TemporaryDirectory() as scratch:
        section = {"source": {**source, "worker_processes": chosen.processes}, "cache_dir": f"{scratch}/cache"}
        config = DataConfig.model_validate({**section, "tokenizer": "bytes"})
        data = open_data(config, seq_len=SEQ, seed=0)
        loader = data.train(ROWS, rows=range(ROWS), num_steps=chosen.batches)
        samples = measure(loader, chosen.batches, chosen.minutes * 60, chosen.lines)
        data.close()
    print("# The memory of worker processes over many batches\n")
    print(
        describe_setting("numpy", "grain"),
        f"{chosen.processes} worker processes, batches of {ROWS} rows of {SEQ}.",
        describe_load(),
    )
    lines = [table_row(count, seconds, usage) for count, seconds, usage in samples]
    print(f"\n{markdown_table(['batches', 'minutes', 'process, MiB', 'workers, MiB', 'segments'], lines)}")
    (first, _, first_memory), (last, _, last_memory) = samples[0], samples[-1]
    process, workers = last_memory.process - first_memory.process, sum(last_memory.workers) - sum(first_memory.workers)
    print(
        f"\nFrom batch {first:,} to batch {last:,} the process grows by {process:.1f} MiB and its workers by "
        f"{workers:.1f}; there are {last_memory.segments} segments, at first {first_memory.segments}."
    )


def measure(loader: Any, batches: int, seconds: float, lines: int) -> list[tuple[int, float, Memory]]:
    """Reads up to `batches` batches, for up to `seconds` seconds.

    Returns:
        (batches so far, seconds so far, memory) after the first batch, at `lines` even intervals, and after the last
        batch.
    """
    samples: list[tuple[int, float, Memory]] = []
    began, due = time.monotonic(), _START_SECONDS
    for count, batch in enumerate(loader, start=1):
        # Check the batch, each row of which was generated from its number.
        assert int(batch.tokens[0, 1]) == (int(batch.tokens[0, 0]) + 1) % 250
        passed = time.monotonic() - began
        if passed >= due or count == batches:
            samples.append((count, passed, read_memory()))
            print(" | ".join(table_row(*samples[-1])), flush=True)
            due += (seconds - _START_SECONDS) / lines
        if passed >= seconds:
            break
    return samples


def table_row(count: int, seconds: float, usage: Memory) -> list[str]:
    """Formats a row of the table."""
    workers = ", ".join(f"{size:.1f}" for size in usage.workers)
    return [f"{count:,}", f"{seconds / 60:.1f}", f"{usage.process:.1f}", workers, str(usage.segments)]


def read_memory() -> Memory:
    """Reads the memory from `/proc`."""
    children = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if _parent_pid(path) == os.getpid()]
    shared = Path("/dev/shm")
    workers = sorted(size for child in children if (size := _resident_mib(child)) > _LEAST)
    return Memory(_resident_mib(os.getpid()), workers, sum(1 for _ in shared.iterdir()) if shared.exists() else 0)


_LEAST = 20.0
"""Minimum MiB of a reader process. Smaller processes are Python's own, which manage shared memory."""


def _parent_pid(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _resident_mib(process: int) -> float:
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
