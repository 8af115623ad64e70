"""Builds the corpus of the tests in a process of its own, which can be killed."""

from __future__ import annotations

import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from lm_trainer.data import DataConfig
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.sources import Shard
from lm_trainer.data.sources.urls import list_files
from lm_trainer.data.tokenize import lock
from lm_trainer.data.tokenize.build import Build, BuildOptions
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from tests.core.forks import start_fork
from tests.hangs import HANG_SECONDS

PART_BYTES = (20_000, 40_000)
MANY = sys.maxsize


def start_builder(
    corpus: Path, directory: Path, *, delay: float = 0.0, dead_seconds: float = 30, most_parts: int = MANY
) -> BaseProcess:
    """Starts to build `corpus` as `make_build` does, in a process that can be killed.

    With `most_parts` it goes no further once that many parts are committed, however late it is killed.
    """
    return start_fork(_build, corpus, directory, delay, dead_seconds, most_parts)


def finish(builder: BaseProcess) -> None:
    """Waits until the process has ended well."""
    builder.join(HANG_SECONDS)
    assert builder.exitcode == 0, "it failed, or hangs if it has no exit code"


def one_per_file(config: DataConfig) -> list[Shard]:
    """Lists the shards of the configuration as if each file were large."""
    files = [file.url for file in list_files(config.train_urls or [], "data.train_urls")]
    return [shard for file in files for shard in config.model_copy(update={"train_urls": [file]}).shards("train")]


class SlowBytes(ByteTokenizer):
    """Leaves time to be killed."""

    delay = 0.0
    most_parts = MANY
    parts = Path()

    def encode_batch(self, texts):
        time.sleep(self.delay)
        while self.most_parts < MANY and len(list(self.parts.glob("*.json"))) >= self.most_parts:
            time.sleep(0.01)
        return super().encode_batch(texts)


class Sleepy(SlowBytes):
    """The same in any process."""

    delay = 0.5


def _build(corpus: Path, directory: Path, delay: float, dead_seconds: float, most_parts: int) -> None:
    SlowBytes.delay, lock.DEAD_SECONDS = delay, dead_seconds
    SlowBytes.parts, SlowBytes.most_parts = directory / "parts", most_parts
    shards = one_per_file(DataConfig(train_urls=[str(corpus / "*.jsonl*")]))
    options = BuildOptions(num_workers=0, part_bytes=PART_BYTES)
    Build("train", KvStore(str(directory)), shards, SlowBytes(), options).run()
