"""Compares the scan rate of `lmt data find` with a plain comparison of all tokens with a single token.

    python -m benchmarks.data_find

The tokens of the corpus included with Python are repeated to 400 million tokens of 16 bits, which fit into the page
cache. Both scans alternate. The medians of five turns are reported, in wall time and in CPU seconds (two cores have two
per second). Three texts are searched: a text without occurrences, a text of common words, and a single common word.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.setting import describe_load, describe_setting, markdown_table

TEXTS = ("It was a bright cold day in April, and the clocks", "return the length of the", "self")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=400_000_000)
    chosen = parser.parse_args()
    from lm_trainer.data.config import DataConfig
    from lm_trainer.data.find import Needle, search_stream
    from lm_trainer.data.pipeline import open_data
    from lm_trainer.data.tokenizer.token_bytes import token_texts

    with tempfile.TemporaryDirectory() as scratch:
        data = open_data(DataConfig(cache_dir=f"{scratch}/cache"), seq_len=128, seed=0)
        stream, texts = data.caches["train/train"].stream, token_texts(data.tokenizer)
        corpus = stream.read(np.array([0]), len(stream))[0]
        file = Path(scratch) / "tokens.bin"
        with file.open("wb") as out:
            for _ in range(-(-chosen.tokens // len(corpus))):
                out.write(corpus.astype(np.uint16).tobytes())
        mapped = MemoryMappedTokens(np.memmap(file, np.uint16, "r"))
        counts = np.bincount(corpus[:65536], minlength=len(texts))
        rows = []
        for text in TEXTS:
            needle = Needle(text.encode(), texts, counts)
            seconds, plain, used, occurrences = [], [], [], 0
            for _ in range(5):
                began, cpu = time.perf_counter(), time.process_time()
                occurrences = sum(1 for _ in search_stream(mapped, needle))  # pyright: ignore[reportArgumentType]
                seconds.append(time.perf_counter() - began)
                used.append(time.process_time() - cpu)
                began = time.perf_counter()
                np.count_nonzero(mapped.tokens == 77)
                plain.append(time.perf_counter() - began)
            every = (seconds, plain, used)
            rate, other, cpu = (mapped.tokens.nbytes / statistics.median(samples) / 1e9 for samples in every)
            rows.append([repr(text), f"{occurrences:,}", f"{rate:.2f}", f"{other:.2f}", f"{cpu:.2f}"])
    print(describe_setting("numpy"), describe_load())
    print(f"\n{len(mapped):,} tokens, {mapped.tokens.nbytes / 1e9:.1f} GB.\n")
    print(markdown_table(["text", "occurrences", "GB/s", "GB/s of a comparison", "GB per CPU-s"], rows))


class MemoryMappedTokens:
    """A memory map of tokens with the interface of a token stream."""

    def __init__(self, tokens: np.ndarray):
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def copy(self, starts: np.ndarray, counts: np.ndarray, out: np.ndarray, places: np.ndarray) -> None:
        del places
        out[:] = self.tokens[int(starts[0]) : int(starts[0] + counts[0])]


if __name__ == "__main__":
    main()
