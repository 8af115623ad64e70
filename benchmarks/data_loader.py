"""Compares the speed of loading training data with a plain loop over a memory map, and times seeks.

Every figure is CPU time (user and system, all threads), because wall time depends on other work on the machine. Both
sides alternate within one process. Medians are reported with the spread of the samples.

    python -m benchmarks.data_loader                     # synthetic tokens in a temporary directory
    python -m benchmarks.data_loader --json loader.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.setting import describe_load, describe_setting, markdown_table
from lm_trainer.core.piecewise import BatchSchedule
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.loader import TrainIterator
from lm_trainer.data.mixture import Mixture, cycle_counts
from lm_trainer.data.rows.chunks import Chunks
from lm_trainer.data.rows.order import TrainOrder, TrainSet
from lm_trainer.data.rows.packing import PackedRows, pack_best_fit
from lm_trainer.data.shuffle import FullShuffle, NoShuffle, ShuffleConfig

EOS, PART, DTYPE = 0, 1 << 22, np.dtype("<u2")
SEEKS = (0, 10**3, 10**6, 10**9)


def write_tokens(directory: Path, parts: int) -> tuple[Ledger, np.ndarray]:
    """Writes parts of random tokens with document lengths as in web text. Returns the ledger and the lengths."""
    rng = np.random.default_rng(0)
    (directory / "parts").mkdir()
    names = [f"00000-{part:05d}" for part in range(parts)]
    lengths = []
    for name in names:
        tokens = rng.integers(1, 50_000, PART).astype(DTYPE)
        ends = np.cumsum(rng.lognormal(6.2, 0.9, PART // 300).astype(np.int64) + 2)
        ends = np.append(ends[ends < PART - 2], PART) - 1
        tokens[ends] = EOS
        lengths.append(np.diff(ends, prepend=-1))
        tokens.tofile(directory / f"parts/{name}.bin")
    return Ledger(parts=names, tokens=[PART] * parts), np.concatenate(lengths)


def make_plain_loop(directory: Path, parts: int, batch: int, seq_len: int) -> Callable[[int], None]:
    """Makes a plain loader, which copies rows from random offsets of memory-mapped files and ignores documents."""
    maps = [np.memmap(directory / f"parts/00000-{part:05d}.bin", DTYPE, "r") for part in range(parts)]
    order = np.random.default_rng(0).permutation(parts * PART // seq_len - 1)

    def load_batch(step: int) -> None:
        rows = np.empty((batch, seq_len + 1), np.int32)
        for row in range(batch):
            part, offset = divmod(int(order[(step * batch + row) % len(order)]) * seq_len, PART)
            piece = maps[part][offset : offset + seq_len + 1]
            rows[row, : len(piece)] = piece

    return load_batch


def cpu_seconds_per_step(run: Callable[[int], object], steps: range) -> float:
    """Measures the CPU seconds per step."""
    started = time.process_time()
    for step in steps:
        run(step)
    return (time.process_time() - started) / len(steps)


def iterator_cpu_seconds_per_step(order: TrainOrder, batch: int, steps: int) -> float:
    """Measures the CPU seconds per step with prefetch threads, including steps that are prefetched but not used."""
    ahead = 6
    iterator = TrainIterator(order, BatchSchedule.constant(batch), range(batch), range(steps + ahead))
    for _ in range(ahead):
        next(iterator)
    seconds = cpu_seconds_per_step(lambda _: next(iterator), range(steps))
    iterator.close()
    return seconds


def summarize_rates(seconds: list[float], tokens: int) -> dict[str, float]:
    rates = sorted(tokens / second / 1e6 for second in seconds)
    return {"median": statistics.median(rates), "least": rates[0], "most": rates[-1], "samples": len(rates)}


def make_orders(stream: TokenStream, lengths: np.ndarray, seq_len: int) -> dict[str, TrainOrder]:
    chunks = Chunks(stream, seq_len, EOS)

    def order_of_one_set(shuffle: ShuffleConfig) -> TrainOrder:
        return TrainOrder([TrainSet("train", chunks, chunks.num_rows, shuffle, 0)], Mixture([(0, (1,))]))

    packed = PackedRows(stream, pack_best_fit(lengths, seq_len), seq_len, EOS)
    sets = [TrainSet(name, chunks, chunks.num_rows, FullShuffle(), seed) for seed, name in enumerate("abc")]
    return {
        "no shuffle": order_of_one_set(NoShuffle()),
        "full shuffle": order_of_one_set(FullShuffle()),
        "mixture of three": TrainOrder(sets, Mixture([(0, cycle_counts((0.5, 0.3, 0.2)))])),
        "best-fit packing": TrainOrder(
            [TrainSet("train", packed, packed.num_rows, FullShuffle(), 0)], Mixture([(0, (1,))])
        ),
    }


def report(result: dict[str, Any]) -> str:
    rates = [
        [
            label,
            f"{rate['median']:.0f}",
            f"{rate['least']:.0f} to {rate['most']:.0f}",
            f"{cost:.2f}",
        ]
        for (label, rate), cost in zip(
            result["million_tokens_per_cpu_second"].items(), result["cost_over_plain_loop"].values(), strict=True
        )
    ]
    seeks = [[f"{int(step):,}", f"{ratio:.2f}"] for step, ratio in result["seek_over_step_0"].items()]
    return "\n\n".join(
        [
            "# Loading, against a plain loop over a memory map",
            f"{describe_setting('numpy', 'grain')} Batches of {result['batch']} rows of {result['seq_len']} tokens. "
            f"{describe_load()}",
            markdown_table(["order", "Mtok per CPU-s", "range", "cost / plain loop's"], rates),
            markdown_table(["a batch at step", "cost / that at step 0"], seeks),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--parts", type=int, default=16, help=f"parts of {PART:,} tokens each")
    parser.add_argument("--steps", type=int, default=40, help="steps per sample")
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    batch, seq_len, tokens = args.batch, args.seq_len, args.batch * args.seq_len

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        ledger, lengths = write_tokens(directory, args.parts)
        orders = make_orders(TokenStream(KvStore(name), ledger, DTYPE), lengths, seq_len)
        plain = make_plain_loop(directory, args.parts, batch, seq_len)
        full = orders["full shuffle"]
        seconds: dict[str, list[float]] = {}
        seeks: dict[int, list[float]] = {step: [] for step in SEEKS}
        for _ in range(args.samples):
            seconds.setdefault("plain loop", []).append(cpu_seconds_per_step(plain, range(args.steps)))
            for label, order in orders.items():
                read = order.read
                samples = cpu_seconds_per_step(
                    lambda step, read=read: read(np.arange(step * batch, (step + 1) * batch)), range(args.steps)
                )
                seconds.setdefault(label, []).append(samples)
            seconds.setdefault("full shuffle, iterator", []).append(
                iterator_cpu_seconds_per_step(full, batch, args.steps)
            )
            for step in SEEKS:
                first = step * batch
                seeks[step].append(
                    cpu_seconds_per_step(
                        lambda i, first=first: full.read(np.arange(first, first + batch) + i), range(20)
                    )
                )
    result: dict[str, Any] = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "batch": batch,
        "seq_len": seq_len,
        "million_tokens_per_cpu_second": {
            label: summarize_rates(samples, tokens) for label, samples in seconds.items()
        },
        "cost_over_plain_loop": {
            label: statistics.median(a / b for a, b in zip(samples, seconds["plain loop"], strict=True))
            for label, samples in seconds.items()
        },
        "seek_over_step_0": {
            str(step): statistics.median(a / b for a, b in zip(samples, seeks[0], strict=True))
            for step, samples in seeks.items()
        },
    }
    print(report(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
