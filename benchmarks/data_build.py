"""How much of the tokenizer's own rate is left when a cache is built: reading, checking and writing included.

    python -m benchmarks.data_build --rounds 5

Both are measured in CPU seconds of one process with one thread, in turn, on the embedded corpus as JSON lines; medians
over the rounds. The tokenizer alone encodes the same documents from memory, in batches of the builder's size.
"""

from __future__ import annotations

import os

os.environ["RAYON_NUM_THREADS"] = "1"  # before the tokenizers start their threads

import argparse
import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from lm_trainer.data import DataConfig
from lm_trainer.data.builder import Build, BuildOptions
from lm_trainer.data.reading import BATCH_BYTES, BATCH_ROWS
from lm_trainer.data.sources import Row
from lm_trainer.data.sources.embedded import Embedded
from lm_trainer.data.store import Store
from lm_trainer.data.tokenizer import HfTokenizer, TrainedBpe, train_bpe
from lm_trainer.data.tokenizer.fast import FastTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--max-bytes", type=int, default=8 << 20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    corpus = Embedded(max_bytes=options.max_bytes)
    documents = [row.text for shard in corpus.shards("train") for row in shard.rows() if isinstance(row, Row)]
    trained = train_bpe(TrainedBpe(vocab_size=options.vocab_size), corpus.shards("train"))
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as directory:
        content = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
        (Path(directory) / "plain.jsonl").write_bytes(content)
        (Path(directory) / "packed.jsonl.gz").write_bytes(gzip.compress(content, 6))
        for kind in (HfTokenizer, FastTokenizer):
            tokenizer = trained.with_backend(kind)
            sources = (Path(directory) / name for name in ("plain.jsonl", "packed.jsonl.gz"))
            results += [compare(documents, tokenizer, source, options.rounds) for source in sources]
    for result in results:
        print(json.dumps(result) if options.json else describe(result))


def compare(documents: list[str], tokenizer: HfTokenizer, source: Path, rounds: int) -> dict[str, object]:
    config = DataConfig(train_urls=[str(source)])

    def build(number: int) -> int:
        store = Store(f"{source}.{tokenizer.backend}.{number}")
        return Build("train", store, config.shards("train"), tokenizer, BuildOptions(num_workers=0)).run().num_tokens

    alone, whole = [], []
    encode(documents, tokenizer)
    for number in range(rounds):
        alone.append(rate(lambda: encode(documents, tokenizer)))
        whole.append(rate(lambda number=number: build(number)))
    ratios = [b / a for a, b in zip(alone, whole, strict=True)]
    return {
        "backend": tokenizer.backend,
        "source": source.name,
        "tokenizer_mtok_per_cpu_s": round(statistics.median(alone), 3),
        "builder_mtok_per_cpu_s": round(statistics.median(whole), 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "rounds": rounds,
    }


def rate(work: Callable[[], int]) -> float:
    """Million tokens per CPU second."""
    started = time.process_time()
    return work() / 1e6 / (time.process_time() - started)


def encode(documents: list[str], tokenizer: HfTokenizer) -> int:
    tokens, batch, size = 0, [], 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if len(batch) >= BATCH_ROWS or size >= BATCH_BYTES:
            tokens += sum(len(ids) for ids in tokenizer.encode_batch(batch))
            batch, size = [], 0
    return tokens + sum(len(ids) for ids in tokenizer.encode_batch(batch))


def describe(result: dict[str, object]) -> str:
    return (
        f"{result['backend']:<10} {result['source']:<16} tokenizer {result['tokenizer_mtok_per_cpu_s']} Mtok/CPU-s, "
        f"builder {result['builder_mtok_per_cpu_s']}, ratio {result['ratio']} {result['ratio_range']}"
    )


if __name__ == "__main__":
    main()
