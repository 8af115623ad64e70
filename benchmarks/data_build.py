"""Compares the build speed of a token cache, including reading, checking and writing, with the bare tokenizer.

    python -m benchmarks.data_build

The tokenizer encodes the same documents from memory, in batches of the builder's size. The builder reads them from a
file, and is also timed with one tokenizer thread. Both alternate in one process, and the medians over the rounds are
reported, in wall time and in CPU seconds. Each turn uses new strings, because every document of a real build is new. In
wall time, the builder reads and writes in parallel with the tokenizer if a core is free, so only CPU seconds show the
full cost. The text is the installed Python code, each file once. Each turn has a new thread, because fastokens caches
words per thread and a real build sees each text once. The last column is the builder's relative speed in wall time if
its CPU seconds kept all cores busy from start to end. This is the upper limit for any scheduling of the same work.

A second table shows builds from eight files, with one process and with one process per core. They alternate, and the
times include the start of the processes. A single process gives the tokenizer one thread per core, so both use all
cores.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.setting import describe_load, describe_setting, markdown_table
from lm_trainer.core.runtime import available_cores, keep_freed_memory
from lm_trainer.data import DataConfig
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.sources import Row
from lm_trainer.data.sources.embedded import Embedded
from lm_trainer.data.tokenize.build import Build, BuildOptions
from lm_trainer.data.tokenize.process_pool import THREAD_VARIABLES
from lm_trainer.data.tokenize.shard_reader import BATCH_ROWS
from lm_trainer.data.tokenizer import HfTokenizer, TrainedBpe, train_bpe
from lm_trainer.data.tokenizer.fast import FastTokenizer

FILES = 8
SOURCES = ("plain.txt", "lines.jsonl", "packed.jsonl.gz", "table.parquet")


class Rate(NamedTuple):
    """MB of text per second."""

    clock: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--megabytes", type=int, default=240, help="maximum text for the fast backend")
    parser.add_argument("--slow-megabytes", type=int, default=8, help="maximum text for the other backend")
    parser.add_argument(
        "--parallel-megabytes", type=int, nargs=2, default=(400, 24), help="size of the files, for both"
    )
    parser.add_argument("--parallel-rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    keep_freed_memory()
    shards = Embedded().shards("train")
    trained = train_bpe(TrainedBpe(vocab_size=options.vocab_size, sample_bytes=2 << 20), shards)
    rows, scaled = [], []
    for kind, megabytes in ((FastTokenizer, options.megabytes), (HfTokenizer, options.slow_megabytes)):
        tokenizer, documents = trained.with_backend(kind), read_installed_code(megabytes * 10**6)
        with tempfile.TemporaryDirectory() as directory:
            for path in write_sources(Path(directory), documents):
                pairs = compare_rates(documents, tokenizer, path, options.rounds if kind is FastTokenizer else 3)
                rows.append([tokenizer.backend, path.name, f"{utf8_bytes(documents) / 1e6:.0f}", *table_cells(pairs)])
            parts = write_parts(
                Path(directory), read_installed_code(options.parallel_megabytes[kind is HfTokenizer] * 10**6)
            )
            scaled.append([tokenizer.backend, *measure_scaling(parts, tokenizer, options.parallel_rounds)])
    heads = ["backend", "source", "MB", "tokenizer, MB/s", "builder", "share (range)"]
    print("# The builder and the tokenizer alone\n")
    print(describe_setting("tokenizers", "fastokens", "orjson", "pyarrow", "tensorstore"), describe_load())
    heads += [
        "tokenizer, MB per CPU-s",
        "builder",
        "share (range)",
        f"share by the clock, {available_cores()} busy cores",
    ]
    print(f"\n{markdown_table(heads, rows)}")
    heads_of_scaling = ["backend", "MB", "processes", "one process, MB/s", "all", "all / one", "cores in use"]
    print(f"\n{markdown_table(heads_of_scaling, scaled)}")


def read_installed_code(max_bytes: int) -> list[str]:
    """Reads the installed Python code file by file, up to a number of bytes."""
    documents, total = [], 0
    for root in (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")):
        for file in sorted(Path(root).rglob("*.py")):
            try:
                text = file.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            documents.append(text)
            total += len(text.encode())
            if total >= max_bytes:
                return documents
    return documents


def utf8_bytes(documents: list[str]) -> int:
    """Returns the total size of the documents in UTF-8 bytes."""
    return sum(len(text.encode()) for text in documents)


def write_sources(directory: Path, documents: list[str]) -> list[Path]:
    import pyarrow
    import pyarrow.parquet

    text, lines, packed, parquet = (directory / name for name in SOURCES)
    text.write_text("\n".join(documents), encoding="utf-8")
    content = "".join(json.dumps({"text": document}) + "\n" for document in documents).encode()
    lines.write_bytes(content)
    packed.write_bytes(gzip.compress(content, 6))
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), parquet, row_group_size=1000)
    return [text, lines, packed, parquet]


def compare_rates(documents: list[str], tokenizer: HfTokenizer, source: Path, rounds: int) -> list[tuple[Rate, Rate]]:
    """Measures the rates of the tokenizer and of the builder in each round."""
    config = DataConfig(train_urls=[str(source)])
    if source.suffix == ".txt":  # text files are split into pieces
        documents = [row.text for shard in config.shards("train") for row in shard.rows() if isinstance(row, Row)]
    stored = [document.encode() for document in documents]
    total = sum(map(len, stored))

    def build() -> None:
        store = KvStore(f"{source}.cache")
        Build("train", store, config.shards("train"), tokenizer, BuildOptions(num_workers=0)).run()

    pairs = []
    for number in range(rounds + 1):
        # Python caches the UTF-8 encoding of a string when a tokenizer first requests it.
        texts = [str(document, "utf-8") for document in stored]
        pair = measure_rate(partial(encode_in_batches, texts, tokenizer), total), measure_rate(build, total)
        shutil.rmtree(f"{source}.cache")
        if number:  # the first round is a warm-up
            pairs.append(pair)
    return pairs


def write_parts(directory: Path, documents: list[str]) -> list[Path]:
    """Writes the documents as JSON lines into files of similar size."""
    paths = [directory / f"part-{number}.jsonl" for number in range(FILES)]
    for number, path in enumerate(paths):
        lines = (json.dumps({"text": document}) + "\n" for document in documents[number::FILES])
        path.write_text("".join(lines), encoding="utf-8")
    return paths


def measure_scaling(paths: list[Path], tokenizer: HfTokenizer, rounds: int) -> list[str]:
    """Measures the columns of the second table."""
    config, stored = DataConfig(train_urls=[str(path) for path in paths]), sum(path.stat().st_size for path in paths)
    cache = paths[0].parent / "cache"

    def build(processes: int) -> tuple[float, float]:
        """Returns MB per second, and the average number of cores that all processes used."""
        started, used = time.perf_counter(), cpu_seconds_with_children()
        options = BuildOptions(num_workers=processes)
        Build("train", KvStore(str(cache)), config.shards("train"), tokenizer, options).run()
        seconds = time.perf_counter() - started
        shutil.rmtree(cache)
        return stored / 1e6 / seconds, (cpu_seconds_with_children() - used) / seconds

    pairs = [(build(1), build(available_cores())) for _ in range(rounds)]
    one, several, busy = (statistics.median(x) for x in zip(*((a[0], b[0], b[1]) for a, b in pairs), strict=True))
    ratio = statistics.median(b[0] / a[0] for a, b in pairs)
    return [
        f"{stored / 1e6:.0f}",
        str(available_cores()),
        f"{one:.1f}",
        f"{several:.1f}",
        f"{ratio:.2f}",
        f"{busy:.2f}",
    ]


def cpu_seconds_with_children() -> float:
    """Returns the CPU seconds of this process and of all its children that have ended."""
    return sum(os.times()[:4])


def measure_rate(work: Callable[[], None], size: int) -> Rate:
    """Measures the rate at which `work`, in a new thread, processes `size` bytes."""
    clock, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
    return Rate(size / 1e6 / (time.perf_counter() - clock), size / 1e6 / (time.process_time() - cpu))


def encode_in_batches(documents: list[str], tokenizer: HfTokenizer) -> None:
    batch, size = [], 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if len(batch) >= BATCH_ROWS or size >= tokenizer.batch_bytes:
            tokenizer.encode_batch(batch)
            batch, size = [], 0
    tokenizer.encode_batch(batch)


def table_cells(pairs: list[tuple[Rate, Rate]]) -> list[str]:
    cells = []
    for metric in (lambda rate: rate.clock, lambda rate: rate.cpu):
        tokenizer, builder = ([metric(pair[side]) for pair in pairs] for side in (0, 1))
        cells += [
            f"{statistics.median(tokenizer):.1f}",
            f"{statistics.median(builder):.1f}",
            _format_ratio(tokenizer, builder),
        ]
    busy_share = statistics.median(available_cores() * builder.cpu / tokenizer.clock for tokenizer, builder in pairs)
    return [*cells, f"{busy_share:.2f}"]


def _format_ratio(tokenizer: list[float], builder: list[float]) -> str:
    shares = sorted(b / a for a, b in zip(tokenizer, builder, strict=True))
    return f"{statistics.median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})"


if __name__ == "__main__":
    main()
