"""The memory of a process that trains on rows of Grain's worker processes, and of these, over very many small batches.

    python -m benchmarks.worker_memory

Tiny rows, so that there are as many batches as time allows: what each batch would leave behind adds up. Resident memory
of the process and of its workers, and the segments of shared memory on this machine, by which batches are handed over,
at even intervals. The first line is that of the time after the start, when buffers are filled.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.setting import load, setting, table

SEQ, ROWS = 16, 2
_START_SECONDS = 15.0


class Memory(NamedTuple):
    """Resident memory in MiB, and segments of shared memory of this machine."""

    process: float
    workers: list[float]
    segments: int


def rows() -> Any:
    """The pipeline: rows of numbers, in Python, without end."""
    import grain
    import numpy as np

    return grain.MapDataset.range(1 << 20).repeat().map(lambda i: {"tokens": (np.arange(SEQ + 1) + int(i)) % 250})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=1_000_000, help="at most")
    parser.add_argument("--minutes", type=float, default=5, help="at most")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--lines", type=int, default=10)
    chosen = parser.parse_args()
    from lm_trainer.data import DataConfig, open_data

    source = {"type": "grain", "factory": f"{Path(__file__).resolve()}:rows", "elements": "rows"}
    with tempfile.TemporaryDirectory() as scratch:
        section = {"source": {**source, "worker_processes": chosen.processes}, "cache_dir": f"{scratch}/cache"}
        config = DataConfig.model_validate({**section, "tokenizer": "bytes"})
        data = open_data(config, seq_len=SEQ, seed=0)
        loader = data.train(ROWS, rows=range(ROWS), num_steps=chosen.batches)
        found = measure(loader, chosen.batches, chosen.minutes * 60, chosen.lines)
        data.close()
    print("# The memory of worker processes over many batches\n")
    print(setting("numpy", "grain"), f"{chosen.processes} worker processes, batches of {ROWS} rows of {SEQ}.", load())
    lines = [line(count, seconds, now) for count, seconds, now in found]
    print(f"\n{table(['batches', 'minutes', 'process, MiB', 'workers, MiB', 'segments'], lines)}")
    (first, _, before), (last, _, after) = found[0], found[-1]
    process, workers = after.process - before.process, sum(after.workers) - sum(before.workers)
    print(
        f"\nFrom batch {first:,} to batch {last:,} the process grows by {process:.1f} MiB and its workers by "
        f"{workers:.1f}; there are {after.segments} segments, at first {before.segments}."
    )


def measure(loader: Any, batches: int, seconds: float, lines: int) -> list[tuple[int, float, Memory]]:
    """Takes at most so many batches for so many seconds.

    Returns:
        (batches so far, seconds so far, memory): the first, so many at even intervals, and that of the last batch.
    """
    found: list[tuple[int, float, Memory]] = []
    began, due = time.monotonic(), _START_SECONDS
    for count, batch in enumerate(loader, start=1):
        # The batch is there: a row of it was made by its number.
        assert int(batch.tokens[0, 1]) == (int(batch.tokens[0, 0]) + 1) % 250
        passed = time.monotonic() - began
        if passed >= due or count == batches:
            found.append((count, passed, memory()))
            print(" | ".join(line(*found[-1])), flush=True)
            due += (seconds - _START_SECONDS) / lines
        if passed >= seconds:
            break
    return found


def line(count: int, seconds: float, now: Memory) -> list[str]:
    """A line of the table."""
    workers = ", ".join(f"{each:.1f}" for each in now.workers)
    return [f"{count:,}", f"{seconds / 60:.1f}", f"{now.process:.1f}", workers, str(now.segments)]


def memory() -> Memory:
    """Reads it from `/proc`."""
    children = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if _parent(path) == os.getpid()]
    shared = Path("/dev/shm")
    workers = sorted(size for child in children if (size := _resident(child)) > _LEAST)
    return Memory(_resident(os.getpid()), workers, sum(1 for _ in shared.iterdir()) if shared.exists() else 0)


_LEAST = 20.0
"""MiB of a process that reads: the others are Python's own, which look after shared memory."""


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _resident(process: int) -> float:
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
