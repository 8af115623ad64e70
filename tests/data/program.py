"""Builds the corpus of the tests in a process of its own, which can be killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from lm_trainer.data import DataConfig
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.tokenize.build import Build
from lm_trainer.data.tokenizer.bytes import ByteTokenizer


def builder_command(corpus: Path, directory: Path, *, delay: float = 0.0, dead_seconds: float = 30) -> list[str]:
    return [sys.executable, __file__, str(corpus), str(directory), str(delay), str(dead_seconds)]


class SlowBytes(ByteTokenizer):
    """Leaves time to be killed."""

    delay = 0.0

    def encode_batch(self, texts):
        time.sleep(self.delay)
        return super().encode_batch(texts)


class Sleepy(SlowBytes):
    """The same in any process."""

    delay = 0.5


def main(corpus: Path, directory: Path, delay: float, dead_seconds: float) -> None:
    """Builds `corpus` as `make_build` does, in a process that can be killed."""
    from lm_trainer.data.tokenize import lock
    from lm_trainer.data.tokenize.build import BuildOptions
    from tests.data.conftest import PART_BYTES, one_per_file

    SlowBytes.delay, lock.DEAD_SECONDS = delay, dead_seconds
    shards = one_per_file(DataConfig(train_urls=[str(corpus / "*.jsonl*")]))
    options = BuildOptions(num_workers=0, part_bytes=PART_BYTES)
    Build("train", KvStore(str(directory)), shards, SlowBytes(), options).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
