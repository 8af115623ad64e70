"""Small files of real text, and caches built from them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lm_trainer.data import DataConfig
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.sources import Row
from lm_trainer.data.sources.embedded import Embedded
from lm_trainer.data.tokenize.build import Build, BuildOptions
from lm_trainer.data.tokenizer import Tokenizer
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from tests.data.program import PART_BYTES, finish, one_per_file, start_builder


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """Some 40 modules of the standard library: 400 kB of text."""
    rows = [row for shard in Embedded().shards("validation") for row in shard.rows()]
    return [row.text[:20_000] for row in rows if isinstance(row, Row)]


@pytest.fixture(scope="session")
def corpus(documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a.jsonl`, `b.jsonl.gz` and `c.jsonl`, each with a third of the documents."""
    directory = tmp_path_factory.mktemp("corpus")
    for index, name in enumerate(("a.jsonl", "b.jsonl.gz", "c.jsonl")):
        lines = "".join(json.dumps({"text": text, "n": index}) + "\n" for text in documents[index::3])
        content = lines.encode()
        (directory / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return directory


@pytest.fixture(scope="session")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Returns the files of an undisturbed build in one process."""
    directory = tmp_path_factory.mktemp("reference")
    finish(start_builder(corpus, directory))
    return contents(directory)


MakeBuild = Callable[..., Build]


@pytest.fixture
def make_build(corpus: Path, tmp_path: Path) -> MakeBuild:
    """Returns a build of `corpus` into `tmp_path/NAME`: one shard per file, parts of about 20 kB, in this process."""

    def make(
        name: str = "cache",
        *,
        urls: list[str] | None = None,
        tokenizer: Tokenizer | None = None,
        config: DataConfig | None = None,
        store: KvStore | None = None,
        **options: object,
    ) -> Build:
        config = config or DataConfig(train_urls=urls or [str(corpus / "*.jsonl*")])
        shards = one_per_file(config)
        chosen = BuildOptions(**{"num_workers": 0, "part_bytes": PART_BYTES, **options})
        store = store or KvStore(str(tmp_path / name))
        return Build("train", store, shards, tokenizer or ByteTokenizer(), chosen)

    return make


def contents(directory: Path) -> dict[str, bytes]:
    """Returns every file of a cache by its name, but for TensorStore's lock files, which a kill may leave behind."""
    files = (path for path in directory.rglob("*") if path.is_file() and not path.name.endswith(".__lock"))
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}
