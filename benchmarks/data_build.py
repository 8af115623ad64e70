"""The share of the tokenizer's own rate that is left when a cache is built: reading, checking and writing included.

    python -m benchmarks.data_build

The tokenizer alone encodes the same documents from memory, in batches of the size of the builder, which reads them from
a file, with as many threads of the tokenizer: one. They take turns in one process, and medians over the rounds are
reported, by the clock and in CPU seconds. Each turn has strings of its own, as every document is new once. By the clock
the builder reads and writes beside the tokenizer, if there is a core for it; CPU seconds say what that costs. The text
is the Python code that is installed, each file once, and each turn has a thread of its own: fastokens remembers the
words that a thread has met, and nobody builds a text twice. The last column is the share by the clock that the builder
would have if its CPU seconds kept all cores busy from the first to the last: no order of the same work is faster.

A second table builds from eight files with one process and with one for each core, in turn, starting them included. A
process alone gives the tokenizer as many threads as there are cores, so both use all of them.
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

from benchmarks.setting import load, setting, table
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
    """MB of text a second."""

    clock: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--megabytes", type=int, default=240, help="of text at most, for the fast backend")
    parser.add_argument("--slow-megabytes", type=int, default=8, help="for the other")
    parser.add_argument("--parallel-megabytes", type=int, nargs=2, default=(400, 24), help="of the files, for each")
    parser.add_argument("--parallel-rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    keep_freed_memory()
    shards = Embedded().shards("train")
    trained = train_bpe(TrainedBpe(vocab_size=options.vocab_size, sample_bytes=2 << 20), shards)
    rows, scaled = [], []
    for kind, megabytes in ((FastTokenizer, options.megabytes), (HfTokenizer, options.slow_megabytes)):
        tokenizer, documents = trained.with_backend(kind), installed(megabytes * 10**6)
        with tempfile.TemporaryDirectory() as directory:
            for path in write_sources(Path(directory), documents):
                pairs = compare(documents, tokenizer, path, options.rounds if kind is FastTokenizer else 3)
                rows.append([tokenizer.backend, path.name, f"{size(documents) / 1e6:.0f}", *columns(pairs)])
            parts = write_parts(Path(directory), installed(options.parallel_megabytes[kind is HfTokenizer] * 10**6))
            scaled.append([tokenizer.backend, *scaling(parts, tokenizer, options.parallel_rounds)])
    heads = ["backend", "source", "MB", "tokenizer, MB/s", "builder", "share (range)"]
    print("# The builder and the tokenizer alone\n")
    print(setting("tokenizers", "fastokens", "orjson", "pyarrow", "tensorstore"), load())
    heads += [
        "tokenizer, MB per CPU-s",
        "builder",
        "share (range)",
        f"share by the clock, {available_cores()} busy cores",
    ]
    print(f"\n{table(heads, rows)}")
    print(f"\n{table(['backend', 'MB', 'processes', 'one process, MB/s', 'all', 'all / one', 'cores in use'], scaled)}")


def installed(most: int) -> list[str]:
    """The Python code that is installed here, file by file, up to so many bytes."""
    documents, total = [], 0
    for root in (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")):
        for file in sorted(Path(root).rglob("*.py")):
            try:
                text = file.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            documents.append(text)
            total += len(text.encode())
            if total >= most:
                return documents
    return documents


def size(documents: list[str]) -> int:
    """Bytes in UTF-8."""
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


def compare(documents: list[str], tokenizer: HfTokenizer, source: Path, rounds: int) -> list[tuple[Rate, Rate]]:
    """The rates of the tokenizer and of the builder, round by round."""
    config = DataConfig(train_urls=[str(source)])
    if source.suffix == ".txt":  # which is read in pieces
        documents = [row.text for shard in config.shards("train") for row in shard.rows() if isinstance(row, Row)]
    stored = [document.encode() for document in documents]
    total = sum(map(len, stored))

    def build() -> None:
        store = KvStore(f"{source}.cache")
        Build("train", store, config.shards("train"), tokenizer, BuildOptions(num_workers=0)).run()

    pairs = []
    for number in range(rounds + 1):
        # Python keeps the UTF-8 of a string beside it once a tokenizer has asked for it.
        texts = [str(document, "utf-8") for document in stored]
        pair = rate(partial(encode, texts, tokenizer), total), rate(build, total)
        shutil.rmtree(f"{source}.cache")
        if number:  # the first warms up
            pairs.append(pair)
    return pairs


def write_parts(directory: Path, documents: list[str]) -> list[Path]:
    """The documents as JSON lines in files of about one size."""
    paths = [directory / f"part-{number}.jsonl" for number in range(FILES)]
    for number, path in enumerate(paths):
        lines = (json.dumps({"text": document}) + "\n" for document in documents[number::FILES])
        path.write_text("".join(lines), encoding="utf-8")
    return paths


def scaling(paths: list[Path], tokenizer: HfTokenizer, rounds: int) -> list[str]:
    """Columns of the second table."""
    config, stored = DataConfig(train_urls=[str(path) for path in paths]), sum(path.stat().st_size for path in paths)
    cache = paths[0].parent / "cache"

    def build(processes: int) -> tuple[float, float]:
        """MB a second, and the cores that all processes used on average."""
        started, used = time.perf_counter(), cpu_of_all()
        options = BuildOptions(num_workers=processes)
        Build("train", KvStore(str(cache)), config.shards("train"), tokenizer, options).run()
        seconds = time.perf_counter() - started
        shutil.rmtree(cache)
        return stored / 1e6 / seconds, (cpu_of_all() - used) / seconds

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


def cpu_of_all() -> float:
    """CPU seconds of this process and of those that it has started and that have ended."""
    return sum(os.times()[:4])


def rate(work: Callable[[], None], size: int) -> Rate:
    """The rate in a thread of its own."""
    clock, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
    return Rate(size / 1e6 / (time.perf_counter() - clock), size / 1e6 / (time.process_time() - cpu))


def encode(documents: list[str], tokenizer: HfTokenizer) -> None:
    batch, size = [], 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if len(batch) >= BATCH_ROWS or size >= tokenizer.batch_bytes:
            tokenizer.encode_batch(batch)
            batch, size = [], 0
    tokenizer.encode_batch(batch)


def columns(pairs: list[tuple[Rate, Rate]]) -> list[str]:
    found = []
    for one in (lambda rate: rate.clock, lambda rate: rate.cpu):
        alone, whole = ([one(pair[side]) for pair in pairs] for side in (0, 1))
        found += [f"{statistics.median(alone):.1f}", f"{statistics.median(whole):.1f}", _share(alone, whole)]
    most = statistics.median(available_cores() * whole.cpu / alone.clock for alone, whole in pairs)
    return [*found, f"{most:.2f}"]


def _share(alone: list[float], whole: list[float]) -> str:
    shares = sorted(b / a for a, b in zip(alone, whole, strict=True))
    return f"{statistics.median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})"


if __name__ == "__main__":
    main()
