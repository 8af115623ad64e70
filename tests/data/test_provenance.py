"""From a row of training back to the documents, and `lmt data at`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.core.piecewise import BatchSchedule, Piecewise
from lm_trainer.data.cache.format import token_dtype
from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.config import DataConfig
from lm_trainer.data.dataset import OpenCache
from lm_trainer.data.pipeline import open_data
from lm_trainer.data.provenance import documents_of_step, iter_passages
from lm_trainer.data.tokenize.build import Build
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from tests.conftest import Lmt
from tests.data.conftest import MakeBuild

SCHEDULE = BatchSchedule(Piecewise.from_phases([(0, 3), (4, 6)]))


@pytest.fixture
def open_set(make_build: MakeBuild) -> OpenCache:
    build: Build = make_build()
    ledger = build.run()
    return OpenCache(build.store, TokenStream(build.store, ledger, token_dtype(257)), ledger, tuple(build.shards))


def test_passages_name_document_and_offset(open_set: OpenCache, corpus: Path, documents: list[str]) -> None:
    names = ("a.jsonl", "b.jsonl.gz", "c.jsonl")
    expected = [
        (f"{corpus}/{name}:{line}", text)
        for first, name in enumerate(names)
        for line, text in enumerate(documents[first::3], start=1)
    ]
    total = len(open_set.stream)
    actual = list(iter_passages(open_set, ByteTokenizer(), 1000, total - 1000))
    assert actual[0].offset == 1000
    rebuilt: dict[str, bytes] = {}
    offsets, start = {source: 0 for source, _ in expected}, 1000
    for passage in actual:
        assert start + passage.tokens <= total
        ids = open_set.stream.read(np.array([start]), passage.tokens)[0]
        text = dict(expected)[passage.where].encode() + b"\0"
        real = bytes(np.where(ids == 256, 0, ids).astype(np.uint8))
        assert text[passage.offset : passage.offset + passage.tokens] == real
        rebuilt[passage.where] = rebuilt.get(passage.where, b"") + real
        start += passage.tokens
    assert start == total
    assert [source for source, _ in expected] == list(rebuilt)
    assert len(offsets) == len(documents)


@pytest.fixture
def make_config(tmp_path: Path, documents: list[str]) -> Callable[..., DataConfig]:
    for index, name in enumerate("ab"):
        lines = [json.dumps({"text": text[:700]}) + "\n" for text in documents[index::2]]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))

    def make(**keys: Any) -> DataConfig:
        sets = {name: {"train_urls": str(tmp_path / f"{name}.jsonl")} for name in "ab"}
        default = {"configs": sets, "train_weights": {"a": 2, "b": 1}, "tokenizer": "bytes"}
        return DataConfig.model_validate({**default, "cache_dir": str(tmp_path / "caches"), **keys})

    return make


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_the_documents_of_a_step_are_those_in_its_batch(make_config: Callable[..., DataConfig], packing: str) -> None:
    data = open_data(make_config(packing=packing), seq_len=256, seed=0)
    (batch,) = data.train(SCHEDULE, rows=range, first_step=5, num_steps=1)
    documents = list(documents_of_step(data, SCHEDULE, 6))
    assert [row.row for row in documents] == list(range(6))
    assert {row.origin.set.name for row in documents} == {"a", "b"}
    for row in documents:
        real = batch.tokens[row.row][batch.segments[row.row] >= 0]
        assert sum(passage.tokens for passage in row.passages) == len(real)
        text = "".join(passage.text for passage in row.passages)
        assert text == data.tokenizer.decode(real.tolist())
        assert all(f"/{row.origin.set.name}.jsonl:" in passage.where for passage in row.passages)
    (alone,) = documents_of_step(data, SCHEDULE, 6, row=4)
    assert alone.passages == documents[4].passages
    with pytest.raises(UserError, match="has 6 rows, counted from 0; there is no row 6"):
        list(documents_of_step(data, SCHEDULE, 6, row=6))
    with pytest.raises(UserError, match="there is no step 0: steps are counted from 1"):
        list(documents_of_step(data, SCHEDULE, 0))
    ending = open_data(make_config(stop_strategy="first_exhausted"), seq_len=256, seed=0)
    max_steps = ending.max_steps(SCHEDULE)
    assert max_steps is not None
    assert list(documents_of_step(ending, SCHEDULE, max_steps))
    with pytest.raises(UserError, match=f"the data end after {max_steps} steps, .*; there is no step {max_steps + 1}"):
        list(documents_of_step(ending, SCHEDULE, max_steps + 1))


def test_the_command_prints_sources_offsets_and_text(tmp_path: Path, lmt: Lmt) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "first document"}\n{"text": "the second one"}\n')
    keys = {
        "data": {"train_urls": "a.jsonl", "tokenizer": "bytes", "shuffle": False, "cache_dir": "cache"},
        "model": {"type": "gpt2", "seq_len": 8, "hidden_dim": 8, "num_heads": 1},
        "trainer": {"train_batch_size": 2, "elastic_shards": 2, "num_train_steps": 3},
    }
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps(keys))
    result = lmt("data", "at", str(config), "--step", "1", "--row", "1", "data.on_bad_row=skip")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "step 1, row 1: row 1, epoch 0",
        "  a.jsonl:1, 7 tokens from 8 on:",
        "    | cument",
        "  a.jsonl:2, 1 tokens from 0 on:",
        "    | t",
    ]
    assert "tokenising the train text" in result.stderr
    result = lmt("data", "at", str(config), "--step", "1", "--row", "1", "--json")
    (row,) = json.loads(result.stdout)["rows"]
    assert (row["row"], row["of_set"], row["epoch"]) == (1, 1, 0)
    assert [(passage["where"], passage["offset"], passage["text"]) for passage in row["passages"]] == [
        ("a.jsonl:1", 8, "cument"),
        ("a.jsonl:2", 0, "t"),
    ]
    result = lmt("data", "at", str(config), "--step", "4")
    assert "step 4, row 0:" in result.stdout
    assert result.stderr == "the run ends after step 3; a longer one would go on so:\n"
    assert "--step" in lmt("data", "at", str(config), "--step", "0").stderr
