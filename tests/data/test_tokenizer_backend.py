"""The faster backend: the same ids, or it is not used."""

from __future__ import annotations

import json
import logging
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.data import DataConfig
from lm_trainer.data.sources import Shard, list_shards
from lm_trainer.data.sources.embedded import Embedded
from lm_trainer.data.sources.in_memory import InMemory
from lm_trainer.data.tokenize.plan import plan_caches
from lm_trainer.data.tokenizer import HfTokenizer, TrainedBpe, train_bpe
from lm_trainer.data.tokenizer.fast import FastTokenizer, choose_backend, find_different_ids
from tests.data.test_tokenizer import HARD_TEXTS

pytest.importorskip("fastokens")


@pytest.fixture(scope="module")
def slow() -> HfTokenizer:
    return train_bpe(TrainedBpe(vocab_size=512, sample_bytes=200_000), Embedded().shards("validation"))


def shards(*texts: str) -> list[Shard]:
    return InMemory(train=list(texts)).shards("train")


class Wrong(FastTokenizer):
    """Gives other ids for one word."""

    def encode_batch(self, texts: Any) -> list[Any]:
        right = super().encode_batch(texts)
        return [np.zeros(1, np.uint32) if "odd" in t else ids for t, ids in zip(texts, right, strict=True)]


def test_gives_the_same_ids(slow: HfTokenizer) -> None:
    fast = slow.with_backend(FastTokenizer)
    assert [list(ids) for ids in fast.encode_batch(HARD_TEXTS)] == [slow.encode(text) for text in HARD_TEXTS]
    assert fast.encode_batch([]) == []
    assert slow.eos_id not in np.concatenate(fast.encode_batch(["a<|endoftext|>b"]))
    assert find_different_ids(slow, fast, [Embedded().shards("validation")]) is None


def test_its_name_and_version_are_in_the_fingerprint(slow: HfTokenizer) -> None:
    import importlib.metadata

    fast = slow.with_backend(FastTokenizer)
    expected = {"backend": "fastokens", "version": importlib.metadata.version("fastokens")}
    assert fast.fingerprint() == {**slow.fingerprint(), **expected}
    copy = pickle.loads(pickle.dumps(fast))
    assert copy.fingerprint() == fast.fingerprint()
    assert fast.files() == slow.files()
    assert fast.identity() == slow.identity(), "a model made for one takes the other"


def test_is_taken_where_it_agrees(slow: HfTokenizer) -> None:
    assert isinstance(choose_backend(slow, "auto", [shards("one")], None), FastTokenizer)
    assert choose_backend(slow, "tokenizers", [shards("one")], None) is slow
    assert choose_backend(slow, "auto", [shards("one")], "tokenizers") is slow, "a cache keeps its backend"


def test_a_difference_in_any_source_is_announced(
    slow: HfTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lm_trainer.data.tokenizer.fast.FastTokenizer", Wrong)
    sources = [shards("fine"), shards("fine", "an odd word")]
    with caplog.at_level(logging.WARNING):
        assert choose_backend(slow, "auto", sources, None) is slow
    assert "it gives other ids for data.source.train[1]" in caplog.text
    for requested, built_with in (("fastokens", None), ("auto", "fastokens")):
        with pytest.raises(UserError, match=r"fastokens cannot be used: .*tokenizer_backend: tokenizers"):
            choose_backend(slow, requested, sources, built_with)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("requested", "built_with"), [("auto", None), ("auto", "fastokens"), ("fastokens", None)])
def test_a_damaged_file_is_not_the_fault_of_the_package(
    slow: HfTokenizer, tmp_path: Path, requested: Any, built_with: str | None
) -> None:
    (tmp_path / "a.jsonl.gz").write_text('{"text": "not packed"}\n')
    damaged = list_shards("train", [str(tmp_path / "a.jsonl.gz")], "text")
    with pytest.raises(UserError, match=rf"^{tmp_path}/a\.jsonl\.gz is damaged: "):
        choose_backend(slow, requested, [shards("fine"), damaged], built_with)


def test_what_the_package_cannot_run_is_announced(slow: HfTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("no such model")

    monkeypatch.setattr("lm_trainer.data.tokenizer.fast.FastTokenizer.__init__", refuse)
    assert choose_backend(slow, "auto", [shards("fine")], None) is slow
    with pytest.raises(UserError, match=r"fastokens cannot be used: it cannot run this tokenizer \(no such model\)"):
        choose_backend(slow, "fastokens", [shards("fine")], None)


def test_a_missing_package_is_named(slow: HfTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert choose_backend(slow, "auto", [shards("one")], None) is slow
    with pytest.raises(UserError, match=r"not installed, but data\.tokenizer_backend asks for it"):
        choose_backend(slow, "fastokens", [shards("one")], None)
    with pytest.raises(UserError, match="not installed, but the cache was built with it"):
        choose_backend(slow, "auto", [shards("one")], "fastokens")


def test_caches_are_the_same_but_for_the_manifest(tmp_path: Path) -> None:
    def build(backend: str) -> dict[str, Any]:
        plan = plan_caches(
            DataConfig.model_validate(
                {
                    "source": {"type": "memory", "train": [text for text in HARD_TEXTS if text] * 20},
                    "tokenizer": {"type": "trained_bpe", "vocab_size": 300},
                    "tokenizer_backend": backend,
                    "cache_dir": str(tmp_path / backend),
                }
            )
        )
        (cache,) = plan.builds.values()
        cache.run()
        root = Path(cache.store.url)
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    fast, slow = build("fastokens"), build("tokenizers")
    manifests = [json.loads(files.pop("manifest.json")) for files in (fast, slow)]
    assert fast == slow
    assert [manifest["tokenizer"]["backend"] for manifest in manifests] == ["fastokens", "tokenizers"]
    assert build("auto").keys() == fast.keys() | {"manifest.json"}
