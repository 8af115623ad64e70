"""Data sets of the hub, in a process of its own, because the hub's client reads its settings once."""

from __future__ import annotations

import gzip
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.core.forks import run_fork
from tests.data.fake_datasets import COMMIT, FakeDatasets, fake_datasets

PROGRAM = """
import json, sys
from lm_trainer.core.errors import UserError
from lm_trainer.data import DataConfig

out = []
for section in json.loads(sys.argv[1]):
    split = section.pop("_split", "train")
    try:
        shards = DataConfig(**section).shards(split)
        rows = [row for shard in shards for row in shard.rows()]
        files = [file for shard in shards for file in shard.identity()["files"]]
        out.append({"texts": [row.text for row in rows], "files": files, "where": [row.where for row in rows]})
    except UserError as error:
        out.append({"error": str(error)})
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def hub():
    with fake_datasets() as served:
        lines = [json.dumps({"text": text}) + "\n" for text in ("j0", "j1")]
        served.files = {
            "org/plain": {
                "README.md": b"# A data set",
                "data/train-00000-of-00002.parquet": parquet(["p0", "p1"]),
                "data/train-00001-of-00002.parquet": parquet(["p2"]),
                "data/test-00000-of-00001.parquet": parquet(["t0"]),
                "data/train.jsonl.zip": b"the same rows once more",
            },
            "org/carded": {
                "en/a.jsonl": "".join(lines).encode(),
                "de/a.jsonl.gz": gzip.compress(b'{"text": "d0"}\n'),
                "de/held.jsonl": b'{"text": "d1"}\n',
            },
            "org/odd": {"table.xlsx": b"a,b"},
        }
        german = [{"split": "train", "path": "de/*.gz"}, {"split": "dev", "path": ["de/held.jsonl"]}]
        english = {"config_name": "en", "data_files": "en/*.jsonl"}
        served.cards = {"org/carded": {"configs": [english, {"config_name": "de", "data_files": german}]}}
        yield served


def parquet(texts: list[str]) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    out = io.BytesIO()
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"text": texts}), out)
    return out.getvalue()


OPEN_UNREACHABLE = """
import sys
import huggingface_hub
from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.files import File, open_binary

if sys.argv[1] == "copy":
    get = huggingface_hub.hf_hub_download
    huggingface_hub.hf_hub_download = lambda *args, **options: get(*args, **options, local_files_only=True)
url = "hf://datasets/org/plain@0123456789012345678901234567890123456789/a.jsonl"
try:
    with open_binary(File(url, 10, "", download=sys.argv[1] == "copy")) as stream:
        stream.read()
except UserError as error:
    print(error)
"""


def run(program: str, argument: str, tmp_path: Path, endpoint: str) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    settings = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1"}
    done = run_fork(program, argument, env={**clean, **settings})
    assert done.returncode == 0, done.stderr
    return done.stdout


def read(hub: FakeDatasets, tmp_path: Path, *sections: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the texts, files and places that each `data` section gives, or its error."""
    return json.loads(run(PROGRAM, json.dumps(sections), tmp_path, hub.endpoint))


def test_splits_configurations_and_revisions(hub: FakeDatasets, tmp_path: Path) -> None:
    plain, held, other, english, german, dev, pinned, url = read(
        hub,
        tmp_path,
        {"id": "org/plain"},
        {"id": "org/plain", "_split": "validation"},
        {"id": "org/plain", "splits": ["train", "test"], "_split": "validation"},
        {"id": "org/carded", "name": "en"},
        {"id": "org/carded", "name": "de"},
        {"id": "org/carded", "name": "de", "splits": ["train", "dev"], "_split": "validation"},
        {"id": "org/plain", "revision": COMMIT, "splits": ["test"]},
        {"train_urls": f"hf://datasets/org/plain@{COMMIT}/data/train-00001-of-00002.parquet"},
    )
    assert plain["texts"] == ["p0", "p1", "p2"]
    assert plain["where"][2] == f"hf://datasets/org/plain@{COMMIT}/data/train-00001-of-00002.parquet:1"
    assert {file["version"] for file in plain["files"]} == {COMMIT}, "a branch is held to its commit"
    assert held["texts"] == [], "a data set without a validation split holds nothing out"
    assert other["texts"] == pinned["texts"] == ["t0"]
    assert (english["texts"], german["texts"], dev["texts"]) == (["j0", "j1"], ["d0"], ["d1"])
    assert url["texts"] == ["p2"]


def test_files_may_be_copied_first(hub: FakeDatasets, tmp_path: Path) -> None:
    hub.requests.clear()
    streamed, copied = read(
        hub, tmp_path, {"id": "org/carded", "name": "en"}, {"id": "org/carded", "name": "en", "stream": False}
    )
    assert streamed == copied, "where the bytes come from changes nothing"
    assert [path.name for path in tmp_path.rglob("snapshots/*/en/*")] == ["a.jsonl"]
    streamed, _ = read(hub, tmp_path / "2", {"id": "org/carded", "name": "en"}, {"id": "org/plain"})
    assert not list((tmp_path / "2").rglob("snapshots/*/en/*"))


def test_what_is_not_there_is_named(hub: FakeDatasets, tmp_path: Path) -> None:
    missing, revision, which, unknown, split, odd = read(
        hub,
        tmp_path,
        {"id": "org/missing"},
        {"id": "org/plain", "revision": "v2"},
        {"id": "org/carded"},
        {"id": "org/carded", "name": "fr"},
        {"id": "org/plain", "splits": ["dev"]},
        {"id": "org/odd"},
    )
    assert "data.id: the Hugging Face hub gave no data set 'org/missing'" in missing["error"]
    assert "at 'v2'" in revision["error"]
    assert "has several configurations; set one of: en, de" in which["error"]
    assert "has no configuration 'fr'; it has: en, de" in unknown["error"]
    assert "no files for the split 'dev'" in split["error"]
    assert "data/train-00000-of-00002.parquet" in split["error"]
    assert "table.xlsx" in odd["error"]


def test_a_hub_that_does_not_answer_is_named(tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    for url in ("hf://datasets/org/plain/a.jsonl", "hf://datasets/org/plain/*.jsonl"):
        (message,) = json.loads(run(PROGRAM, json.dumps([{"train_urls": url}]), tmp_path, nowhere))
        assert message["error"].startswith(f"data.train_urls: the Hugging Face hub gave no {url}: ")
        assert message["error"].endswith("Without network name local files")


@pytest.mark.parametrize("mode", ["stream", "copy"])
def test_a_hub_that_no_longer_answers_is_named(tmp_path: Path, mode: str) -> None:
    output = run(OPEN_UNREACHABLE, mode, tmp_path, "http://127.0.0.1:9")
    assert output.startswith("cannot read hf://datasets/org/plain@0123456789012345678901234567890123456789/a.jsonl: ")
