"""Pipelines of Grain as the source of a configuration: records to tokenise, and rows to train on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from pydantic import ValidationError

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.data import DataConfig, open_data
from lm_trainer.data.dataset import Data
from tests.conftest import lmt_environment
from tests.hangs import HANG_SECONDS

PIPELINES = """
import itertools

import grain
import numpy as np

SEQ = 8


def texts(count=40, kind="map", key=None):
    made = grain.MapDataset.source([f"document {i} " + "word " * (i % 7) for i in range(count)])
    if key:
        made = made.map(lambda text: {key: text, "n": np.int64(3)})
    return made if kind == "map" else made.to_iter_dataset()


def ids():
    return grain.MapDataset.range(30).map(lambda i: np.arange(i + 1) % 250)


def even():
    return grain.MapDataset.range(40).filter(lambda i: i % 2 == 0).map(lambda i: f"document {i}")


def row(index, rng=None):
    tokens = np.random.default_rng(int(index)).integers(0, 250, SEQ + 1)
    return {"tokens": tokens[:-1], "targets": tokens[1:]}


def rows(count=50, kind="map", repeat=False, whole=False):
    made = grain.MapDataset.range(count).seed(1).shuffle()
    if repeat:
        made = made.repeat()
    make = (lambda i: {"tokens": np.concatenate([row(i)["tokens"], [256]])}) if whole else row
    made = made.map(make)
    # By default sixteen threads would read 500 rows ahead, at each start.
    return made if kind == "map" else made.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))


def wrong(**fields):
    return grain.MapDataset.range(4).map(lambda i: {name: np.asarray(value) for name, value in fields.items()})


def unseeded():
    return grain.MapDataset.range(100).map(lambda i: {"text": f"{i} {np.random.default_rng().integers(10**9)}"})


_calls = itertools.count()


def growing():
    return grain.MapDataset.range(10 + next(_calls)).map(str)


def order_matters():
    seen = itertools.count()
    return grain.MapDataset.range(100).map(lambda i: f"{i} {next(seen)}")


def late():
    return grain.MapDataset.range(100).map(lambda i: "x" * 200 + str(np.random.default_rng().integers(10**9)))


def failing():
    return grain.MapDataset.range(10).map(lambda i: 1 // 0)


def nothing():
    return 3
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pipelines") / "pipelines.py"
    path.write_text(PIPELINES)
    return str(path)


def open_source(tmp_path: Path, factory: str, *, source: dict[str, Any] | None = None, **more: Any) -> Data:
    section = {"source": {"type": "grain", "factory": factory, **(source or {})}, "tokenizer": "bytes"}
    config = {"cache_dir": str(tmp_path / "cache"), **section, **more}
    return open_data(DataConfig.model_validate(config), seq_len=8, seed=3)


def batches(data: Data, steps: int = 6, first: int = 0, rows: Any = range(4)) -> list[Batch]:
    taken_batches = list(data.train(4, rows=rows, first_step=first, num_steps=steps - first))
    data.close()
    return taken_batches


def assert_equal(actual: list[Batch], expected: list[Batch]) -> None:
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "source", [{}, {"args": {"kind": "iter"}}, {"args": {"key": "text"}}], ids=["map", "iter", "objects"]
)
def test_records_are_trained_on_as_a_list_of_them(tmp_path: Path, module: str, source: dict[str, Any]) -> None:
    data = open_source(tmp_path, f"{module}:texts", source={**source, "validation_args": {"count": 5}})
    listed = {"source": {"type": "memory", "train": [f"document {i} " + "word " * (i % 7) for i in range(40)]}}
    config = {"tokenizer": "bytes", "cache_dir": str(tmp_path / "listed"), **listed}
    assert_equal(batches(data), batches(open_data(DataConfig.model_validate(config), seq_len=8, seed=3)))
    assert list(data.validation()) == ["validation"]


def test_records_of_ids_and_filtered_ones(tmp_path: Path, module: str) -> None:
    data = open_source(tmp_path, f"{module}:ids", format={"type": "ids"}, shuffle=False)
    (batch,) = batches(data, 1)
    stream = np.concatenate([[*range(i + 1), 256] for i in range(10)])
    np.testing.assert_array_equal(batch.tokens.reshape(-1), stream[:32])
    data = open_source(tmp_path, f"{module}:even", cache_dir=str(tmp_path / "even"))
    assert data.caches["train/train"].ledger.num_documents == 20


@pytest.mark.parametrize("kind", ["map", "iter"])
def test_rows_are_trained_on_in_their_order(tmp_path: Path, module: str, kind: str) -> None:
    source = {"args": {"kind": kind, "repeat": True}, "elements": "rows"}
    data = open_source(tmp_path, f"{module}:rows", source=source)
    (note,) = data.notes
    assert ("random access" if kind == "map" else "in sequence") in note
    actual = batches(data, 20)
    sys.path.insert(0, str(Path(module).parent))
    import pipelines  # pyright: ignore[reportMissingImports]

    expected = pipelines.rows(repeat=True)
    for step, batch in enumerate(actual):
        for index in range(4):
            np.testing.assert_array_equal(batch.tokens[index], expected[4 * step + index]["tokens"])
            np.testing.assert_array_equal(batch.targets[index], expected[4 * step + index]["targets"])
        assert batch.weights.dtype == np.float32
        assert batch.positions[0].tolist() == list(range(8))
    # From any step, and the rows of two processes, which together are those of one.
    assert_equal(batches(open_source(tmp_path, f"{module}:rows", source=source), 20, first=13), actual[13:])
    reopened = open_source(tmp_path, f"{module}:rows", source=source)
    half = batches(reopened, 5, rows=[2, 3])
    np.testing.assert_array_equal(half[4].tokens, actual[4].tokens[2:])
    assert data.fingerprint() == reopened.fingerprint()
    other = {"args": {"kind": kind, "count": 49, "repeat": True}, "elements": "rows"}
    assert data.fingerprint() != open_source(tmp_path, f"{module}:rows", source=other).fingerprint()


def test_rows_have_no_documents(tmp_path: Path, module: str) -> None:
    grain = {"source": {"type": "grain", "factory": f"{module}:rows", "elements": "rows"}}
    with pytest.raises(UserError, match=r"the data are rows that a pipeline of Grain makes .* no documents"):
        DataConfig.model_validate(grain).require_documents()
    mixture = {"configs": {"text": {"train_urls": ["a.jsonl"]}, "made": grain}, "train_weights": {"text": 1, "made": 1}}
    with pytest.raises(UserError, match=r"the set made is rows"):
        DataConfig.model_validate(mixture).require_documents()
    with pytest.raises(ValueError, match="exclude leaves out documents, but a pipeline of Grain makes rows"):
        DataConfig.model_validate({**grain, "exclude": "list.jsonl"})


def test_rows_in_sequence_go_on_from_a_state(tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"args": {"kind": "iter", "repeat": True}, "elements": "rows"}
    full = batches(open_source(tmp_path, f"{module}:rows", source=source), 30)
    first = open_source(tmp_path, f"{module}:rows", source=source).train(4, rows=range(4), num_steps=30)
    for _ in range(17):
        next(first)
    state = json.loads(json.dumps(first.get_state()))
    first.close()
    assert state["next_index"] == 17
    reopened = open_source(tmp_path, f"{module}:rows", source=source)
    remaining = reopened.train(4, rows=range(4), first_step=17, num_steps=13)
    remaining.restore_state(state)
    assert_equal(list(remaining), full[17:])
    # It was not read from the beginning.
    rows: Any = reopened.train_sets[0].rows
    assert state["rows"]["train"]["row"] > 0
    assert min(rows._sequence._snapshots) >= state["rows"]["train"]["row"]


def test_rows_that_are_tokens_alone_are_cut_into_documents(tmp_path: Path, module: str) -> None:
    (batch,) = batches(open_source(tmp_path, f"{module}:rows", source={"args": {"whole": True}, "elements": "rows"}), 1)
    assert batch.targets[:, -1].tolist() == [256] * 4
    assert batch.weights.min() == 1


def test_a_mixture_of_rows_and_text(tmp_path: Path, module: str) -> None:
    text: dict[str, Any]
    rows: dict[str, Any]
    text, rows = ({"source": {"type": "grain", "factory": f"{module}:{name}"}} for name in ("texts", "rows"))
    rows["source"] |= {"elements": "rows", "args": {"repeat": True}}
    config = {"configs": {"text": text, "rows": rows}, "train_weights": {"text": 0.5, "rows": 0.5}}
    more = {"tokenizer": "bytes", "cache_dir": str(tmp_path / "cache")}
    data = open_data(DataConfig.model_validate({**config, **more}), seq_len=8, seed=3)
    assert [batch.tokens.shape for batch in batches(data, 3)] == [(4, 8)] * 3


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("unseeded", r"not deterministic: its element \d+ was another when it was made again \(in text\); seed it"),
        ("order_matters", "not deterministic: its element"),
        ("late", r"\(from character 20\d on: 'x+\d+', then 'x+\d+'\)"),
        ("growing", r"not deterministic: it made a dataset of 1\d elements, and then one of 1\d"),
        ("failing", "an element of .*failing failed: ZeroDivisionError"),
        ("nothing", "returned int; expected a grain.MapDataset or"),
        ("absent", "there is no function or class absent in"),
    ],
)
def test_pipelines_that_cannot_be_trusted_are_refused(tmp_path: Path, module: str, function: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_source(tmp_path, f"{module}:{function}")


def test_a_length_that_changes_between_attempts_is_refused(tmp_path: Path, module: str) -> None:
    open_source(tmp_path, f"{module}:texts")
    with pytest.raises(UserError, match=r"was built from something else(.|\n)*'length': 40(.|\n)*'length': 41"):
        open_source(tmp_path, f"{module}:texts", source={"args": {"count": 41}})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": [1] * 8}, r"wrong\[0\]: tokens has shape \(8,\) and type int64; expected \(9,\) of int32"),
        ({"tokens": [1] * 7, "targets": [1] * 8}, r"tokens has shape \(7,\)"),
        ({"tokens": [1.5] * 8, "targets": [1] * 8}, "type float64; expected"),
        ({"tokens": [1] * 8, "targets": [300] * 8}, r"targets\[0\] is 300, but data.tokenizer has 257 tokens"),
        ({"tokens": [1] * 8, "weights": [1] * 8}, "has no targets; give them, or tokens alone, 9 of them"),
        ({"tokens": [1] * 8, "labels": [1] * 8}, "has a field labels; a row has tokens, targets"),
        ({"text": "x"}, "is no row: expected an object with tokens and targets, found text"),
    ],
)
def test_rows_of_a_wrong_shape_are_named(tmp_path: Path, module: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_source(tmp_path, f"{module}:wrong", source={"args": fields, "elements": "rows"})


def test_keys_that_contradict_one_another(tmp_path: Path, module: str) -> None:
    rows = {"elements": "rows"}
    with pytest.raises(ValidationError, match=r"expected package\.module:function"):
        open_source(tmp_path, "my_module")
    with pytest.raises(UserError, match=r"cannot import no_such_module: .*install it, or name its file"):
        open_source(tmp_path, "no_such_module:rows")
    with pytest.raises(UserError, match="there is no file"):
        open_source(tmp_path, "no_such_file.py:rows")
    with pytest.raises(UserError, match="read in its own order"):
        open_source(tmp_path, f"{module}:rows", source=rows, shuffle=100)
    with pytest.raises(UserError, match="nothing can be held out"):
        open_source(tmp_path, f"{module}:rows", source=rows, num_validation_sequences=2)
    with pytest.raises(UserError, match="repeats its records without end"):
        open_source(tmp_path, f"{module}:rows", source={"args": {"repeat": True}})
    with pytest.raises(UserError, match=r"its elements are rows of tokens; set data\.source\.elements: rows"):
        open_source(tmp_path, f"{module}:rows")
    with pytest.raises(UserError, match="ended after 50 rows; let it repeat"):
        batches(open_source(tmp_path, f"{module}:rows", source={**rows, "args": {"kind": "iter"}}), 20)


READ = """
import sys, os
from pathlib import Path
from lm_trainer.data import DataConfig, open_data

if __name__ == "__main__":
    source = {"type": "grain", "factory": sys.argv[1], "elements": "rows", "args": {"repeat": True}}
    source["worker_processes"] = int(sys.argv[2])
    section = {"source": source, "tokenizer": "bytes", "cache_dir": sys.argv[3]}
    data = open_data(DataConfig.model_validate(section), seq_len=8, seed=3)
    steps, mode = int(sys.argv[4]), sys.argv[5]
    for number, batch in enumerate(data.train(4, rows=range(4), first_step=5, num_steps=steps)):
        if number < 12:
            print(batch.tokens.sum(), batch.targets.sum(), batch.positions.sum(), flush=True)
        if number == 12 and mode == "wait":
            print("waiting", flush=True)
            sys.stdin.read()
    data.close()
"""


def start(tmp_path: Path, module: str, processes: int, mode: str) -> subprocess.Popen[str]:
    (tmp_path / "read.py").write_text(READ)
    command = [sys.executable, str(tmp_path / "read.py"), f"{module}:rows", str(processes), str(tmp_path), "20", mode]
    pipes: dict[str, Any] = {**dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE), "text": True}
    return subprocess.Popen(command, env=lmt_environment(), **pipes)


def children(pid: int) -> list[int]:
    """Processes that were started by any of its threads."""
    pids = "".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(child) for child in pids.split()]


@pytest.mark.slow
def test_worker_processes_give_the_same_batches_and_end_with_the_run(tmp_path: Path, module: str) -> None:
    threads, workers = (start(tmp_path, module, processes, "end") for processes in (0, 2))
    out, errors = zip(*(process.communicate(timeout=200) for process in (threads, workers)), strict=True)
    assert out[0] == out[1]
    assert "leaked" not in errors[1]
    assert len(out[0].splitlines()) == 12
    shared = set(os.listdir("/dev/shm"))
    killed = start(tmp_path, module, 2, "wait")
    assert killed.stdout is not None
    while killed.stdout.readline() != "waiting\n":
        pass
    pids = children(killed.pid)
    assert len(pids) >= 2
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    deadline = time.monotonic() + HANG_SECONDS
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("psm_") and name not in shared]
