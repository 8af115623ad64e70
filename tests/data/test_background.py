"""Data that are read while they are tokenised: the same batches as from a finished cache, and no way to hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.data import DataConfig, open_data
from lm_trainer.data.cache.format import token_dtype
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.dataset import Data
from lm_trainer.data.loader import TrainIterator
from lm_trainer.data.rows.row_builder import PendingEvalSet
from lm_trainer.data.tokenize.background import BackgroundBuild, BackgroundBuilds
from lm_trainer.data.tokenize.build import BuildOptions
from lm_trainer.data.tokenize.open_cache import OpenCache
from lm_trainer.data.tokenize.shard_reader import AHEAD
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.run.training.data_notes import describe_build
from tests.conftest import lmt_environment
from tests.data.conftest import MakeBuild, contents
from tests.data.program import start_builder
from tests.hangs import HANG_SECONDS

SEQ_LEN, BATCH, STEPS = 64, 8, 100
ERAS = {"type": "era", "first": 16, "growth": 2, "largest": 64}


class Gate:
    """Lets a batch of documents be encoded only when it is told to."""

    def __init__(self) -> None:
        self._left, self._open, self.waits = threading.Semaphore(0), False, False

    def encode(self, _: object, texts: list[str]) -> list[Any]:
        # A timeout, because opening the gate releases nobody who waits for a turn.
        while not self._open and not self._left.acquire(timeout=0.01):
            self.waits = True
        self.waits = False
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def release(self, count: int = 1) -> None:
        self._left.release(count)

    def open(self) -> None:
        self._open = True


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Builds in threads of this process, in parts of about 4 kB."""
    gate = Gate()
    monkeypatch.setattr(ByteTokenizer, "encode_batch", lambda self, texts: gate.encode(self, texts))
    monkeypatch.setattr("lm_trainer.data.tokenize.plan.BuildOptions", partial(BuildOptions, part_bytes=(2000, 4000)))
    # Text as small as this is otherwise tokenised before anything is read.
    monkeypatch.setattr("lm_trainer.data.pipeline.FOREGROUND_BYTES", 0)
    # What is committed is seen at once and not by the clock, so that the gate alone decides when.
    monkeypatch.setattr("lm_trainer.data.tokenize.build.POLL_SECONDS", 0.0)
    yield gate
    gate.open()


@pytest.fixture
def make_config(tmp_path: Path, documents: list[str]) -> Callable[..., DataConfig]:
    """A training text of 24 kB and a validation file, or two sets of 12 kB."""
    for name, texts in {"a": documents[:10], "b": documents[10:20], "held": documents[20:22]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text[:1200]}) + "\n" for text in texts))

    def make(cache: str, **changes: Any) -> DataConfig:
        plain: dict[str, Any] = {"tokenizer": "bytes", "num_workers": 0, "cache_dir": str(tmp_path / cache)}
        if "train_weights" in changes:
            plain["configs"] = {name: {"train_urls": str(tmp_path / f"{name}.jsonl")} for name in "ab"}
        else:
            plain |= {"train_urls": [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]}
        return DataConfig.model_validate(plain | changes)

    return make


def open_growing(config: DataConfig) -> Data:
    return open_data(config, seq_len=SEQ_LEN, seed=7, background=True)


def until(condition: Callable[[], object], description: str) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, description
        time.sleep(0.005)


def drain(iterator: TrainIterator, batches: list[Batch]) -> None:
    """Takes one batch after another as the training loop does, which asks for missing tokens until there are none."""
    while True:
        until(lambda: iterator.missing_tokens() is None, "it fails or goes on")
        batches.append(next(iterator))


MIXED = {"train_weights": [[0, {"a": 0.7, "b": 0.3}], [12, {"a": 0.2, "b": 0.8}]]}


@pytest.mark.parametrize(
    ("changes", "early"),
    [
        ({"shuffle": False}, True),
        ({"shuffle": ERAS}, True),
        ({"shuffle": 16, "num_validation_sequences": 5}, True),
        ({"shuffle": True}, False),
        ({"shuffle": True, "max_train_batches": 3}, True),
        ({"shuffle": ERAS, **MIXED}, True),
        ({"shuffle": False, "packing": "best_fit"}, False),
        (
            {"shuffle": ERAS, "packing": {"b": "best_fit"}, "train_weights": [[0, {"a": 1}], [12, {"a": 1, "b": 3}]]},
            True,
        ),
        ({"shuffle": False, "stop_strategy": "first_exhausted", "epochs": 3}, False),
    ],
    ids=str,
)
def test_the_batches_are_those_of_a_finished_cache(
    gate: Gate, make_config: Callable[..., DataConfig], changes: dict[str, Any], early: bool
) -> None:
    data = open_growing(make_config("growing", **changes))
    assert (data.waits_for_all is None) == early
    assert ("the first step waits until all text is tokenised" in describe_build(data)) == (not early)
    advised = "to begin at once, write data.shuffle: {type: era}" in describe_build(data)
    assert advised == (not early and changes["shuffle"] is True)
    iterator = data.train(BATCH, rows=range(2, 6), num_steps=STEPS)
    growing = iterator.growing
    assert growing
    batches, began_early = [], False
    for _ in range(STEPS):
        while (missing := iterator.missing_tokens()) is not None:
            assert str(missing).startswith("waiting for tokenised data")
            # Turns would add up: all text could be tokenised before the first batch is asked for again. A builder that
            # waits for its turn has at most `AHEAD` parts that are not committed yet.
            until(
                lambda: gate.waits or iterator.missing_tokens() is None or data.complete,
                "the build comes to its next part",
            )
            if gate.waits:
                gate.waits = False
                gate.release()
        began_early |= not batches and not data.complete
        batches.append(next(iterator))
        if len(batches) > STEPS // 2:
            gate.open()
    assert began_early == early, "the first batch comes before the text is all tokenised, or must not"
    until(lambda: data.complete, "the build goes on to its end")
    assert iterator.missing_tokens() is None
    finished = open_data(make_config("finished", **changes), seq_len=SEQ_LEN, seed=7)
    num_rows = sum(train.num_rows for train in finished.train_sets)
    assert len(batches) > 2 * num_rows // BATCH, "the test needs more than two epochs"
    for step, (got, expected) in enumerate(
        zip(batches, finished.train(BATCH, rows=range(2, 6), num_steps=STEPS), strict=True)
    ):
        for name, field in got._asdict().items():
            np.testing.assert_array_equal(field, getattr(expected, name), err_msg=f"{step} {name}")
    assert data.fingerprint() == finished.fingerprint(), "the caches lie in different places, and hold the same"
    for opened in (data, finished):
        opened.close()


def test_the_identity_of_the_data_is_known_at_once_and_stays(
    gate: Gate, make_config: Callable[..., DataConfig]
) -> None:
    config = make_config("cache", validation_urls=[])
    data = open_growing(config)
    assert not data.complete
    identity = data.fingerprints(3)
    assert identity.keys() == {"sources"}
    with pytest.raises(RuntimeError, match="still being tokenised"):
        data.fingerprint()
    assert open_growing(config.model_copy(update={"shuffle": False})).fingerprints(3) != identity
    gate.open()
    until(lambda: data.complete, "all is tokenised")
    assert data.fingerprints(3) == {**identity, "tokens": data.fingerprint(3)}
    reopened = open_growing(config)
    assert reopened.builds is None, "there is nothing left to build"
    assert reopened.fingerprints(3) == data.fingerprints(3)
    data.close()


def test_a_held_out_set_is_waited_for(
    gate: Gate, make_config: Callable[..., DataConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"shuffle": False, "validation_urls": [str(tmp_path / "held.jsonl")]}
    data = open_growing(make_config("growing", **changes))
    (pending,) = data.validation().values()
    assert isinstance(pending, PendingEvalSet)
    assert str(pending.missing_tokens()).startswith("waiting for tokenised data")
    gate.open()
    batches = list(pending.batches(BATCH, rows=range(BATCH)))
    assert pending.missing_tokens() is None
    monkeypatch.undo()
    (evals,) = open_data(make_config("finished", **changes), seq_len=SEQ_LEN, seed=7).validation().values()
    for got, expected in zip(batches, evals.batches(BATCH, rows=range(BATCH)), strict=True):
        np.testing.assert_array_equal(got.tokens, expected.tokens)
    data.close()


def test_a_build_that_fails_ends_the_waiting_with_its_own_words(
    gate: Gate, make_config: Callable[..., DataConfig], tmp_path: Path
) -> None:
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write("{broken\n")
    data = open_growing(make_config("cache", shuffle=False))
    iterator = data.train(BATCH, rows=range(BATCH), num_steps=1000)
    gate.open()
    batches: list[Batch] = []
    with pytest.raises(UserError, match=r"b\.jsonl:11: not JSON"):
        drain(iterator, batches)
    assert 0 < len(batches) < data.num_train_tokens / SEQ_LEN
    with pytest.raises(UserError, match=r"b\.jsonl:11: not JSON"):
        next(iterator)  # a reader that does not ask for missing tokens does not hang either
    with pytest.raises(UserError, match=r"b\.jsonl:11: not JSON"):
        data.check_builds()
    data.close()


def test_too_little_text_is_refused_once_that_is_known(gate: Gate, make_config: Callable[..., DataConfig]) -> None:
    data = open_data(make_config("cache"), seq_len=1 << 20, seed=0, background=True)
    iterator = data.train(1, rows=range(1), num_steps=1)
    assert iterator.missing_tokens() is not None
    gate.open()
    with pytest.raises(UserError, match="less than one row of 1048576"):
        until(lambda: iterator.missing_tokens() is None, "it is refused")
    data.close()


def test_the_end_of_the_data_is_checked_once_it_is_known(gate: Gate, make_config: Callable[..., DataConfig]) -> None:
    data = open_growing(make_config("cache", stop_strategy="all_exhausted"))
    iterator = data.train(BATCH, rows=range(BATCH), num_steps=10**6)
    gate.open()
    with pytest.raises(UserError, match="the data end after"):
        until(lambda: iterator.missing_tokens() is None, "it is refused")
    data.close()


def test_closing_ends_the_build_and_keeps_what_was_built(
    gate: Gate, make_config: Callable[..., DataConfig], tmp_path: Path
) -> None:
    threads = set(threading.enumerate())
    data = open_growing(make_config("cache", shuffle=False))
    iterator = data.train(BATCH, rows=range(BATCH), first_step=30, num_steps=1000)
    # The thread that reads may take some of them for batches whose turn is later, and the first part is seen with the
    # second batch at the earliest.
    gate.release(2 * AHEAD + 1)
    until(lambda: data.num_train_tokens > 0, "parts are written")
    # The batches of rows at hand are finished first, in the two threads that encode.
    threading.Timer(0.2, gate.release, [AHEAD + 2]).start()
    data.close()
    assert not [thread for thread in set(threading.enumerate()) - threads if thread.name == "tokenise"]
    assert not (tmp_path / "cache/train/builder.json").exists()
    with pytest.raises(RuntimeError, match="closed"):
        iterator.missing_tokens()
    committed = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache/train/parts").glob("*.json")}
    assert committed
    gate.open()
    open_data(make_config("cache", shuffle=False), seq_len=SEQ_LEN, seed=7).close()
    assert {path: path.stat().st_mtime_ns for path in committed} == committed


def test_a_full_disk_ends_the_waiting(gate: Gate, make_config: Callable[..., DataConfig]) -> None:
    def full(self: object, key: str, value: bytes, *, if_generation: bytes | None = None) -> bool:
        if key.endswith("3.bin"):
            raise MachineError(f"the disk is full: cannot write {key}")
        return write(self, key, value, if_generation=if_generation)

    from lm_trainer.data.cache.kvstore import KvStore

    write: Any = KvStore.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KvStore, "write", full)
        data = open_growing(make_config("cache", shuffle=False))
        iterator = data.train(BATCH, rows=range(BATCH), num_steps=1000)
        gate.open()
        with pytest.raises(MachineError, match="the disk is full"):
            drain(iterator, [])
        data.close()


def test_another_builder_is_followed_and_replaced_when_it_is_killed(
    make_build: MakeBuild, corpus: Path, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    """Two runs on one cache: one builds, the other reads its parts, and goes on in its place."""
    directory = tmp_path / "cache"
    other = start_builder(corpus, directory, delay=0.2)
    until(lambda: list(directory.glob("parts/*.json")), "the other one has begun")
    build = make_build()
    ledger = build.read_ledger()
    cache = OpenCache(build.store, TokenStream(build.store, ledger, token_dtype(257)), ledger, tuple(build.shards))
    builds = BackgroundBuilds([BackgroundBuild(build, cache)], one_by_one=False)
    builds.start()
    until(lambda: len(cache.stream) > 0, "what the other one writes is read")
    assert other.exitcode is None, "the other one was to be killed at work"
    assert not cache.finished
    other.kill()
    other.join()
    until(lambda: cache.finished, "the build is taken over")
    builds.close()
    assert len(cache.stream) == Ledger.read(build.store).num_tokens
    assert contents(directory) == reference


SCRIPT = """
import multiprocessing, sys, time
import lm_trainer.data.tokenize.plan, lm_trainer.data.tokenize.tokenizer_setup, lm_trainer.data.pipeline
from lm_trainer.data import DataConfig, open_data
from tests.data.program import SlowBytes

class VerySlow(SlowBytes):
    delay = 0.3

if __name__ == "__main__":
    from functools import partial
    lm_trainer.data.pipeline.FOREGROUND_BYTES = 0
    lm_trainer.data.tokenize.tokenizer_setup.ByteTokenizer = VerySlow
    plan = lm_trainer.data.tokenize.plan
    plan.BuildOptions = partial(plan.BuildOptions, part_bytes=(2000, 4000))
    data = open_data(DataConfig.model_validate_json(sys.argv[1]), seq_len=64, seed=0, background=True)
    iterator = data.train(8, rows=range(8), num_steps=1000)
    next(iterator)
    assert not data.complete
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    if sys.argv[2] == "wait":
        time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["return", "wait"])
def test_no_process_outlives_a_run(make_config: Callable[..., DataConfig], tmp_path: Path, end: str) -> None:
    """A run that returns without closing anything, and one that is killed."""
    (tmp_path / "script.py").write_text(SCRIPT)
    config = make_config("cache", shuffle=False, num_workers=1).model_dump_json(exclude_unset=True)
    run = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), config, end],
        env=lmt_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    workers = [int(pid) for pid in run.stdout.readline().split()]
    assert len(workers) == 1, "the text is tokenised by a process"
    if end == "wait":
        os.kill(run.pid, signal.SIGKILL)
    assert run.wait(60) == (0 if end == "return" else -signal.SIGKILL)
    run.stdout.close()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "its workers are gone as well")
