"""The cache: exact, reproducible to the byte, and never silently another one's."""

from __future__ import annotations

import hashlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.data import DataConfig
from lm_trainer.data.cache.format import BUILDER
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.sources.text import PIECE_BYTES
from lm_trainer.data.tokenize.build import Build
from lm_trainer.data.tokenize.progress import BuildCallbacks, BuildProgress
from lm_trainer.data.tokenizer import TrainedBpe, train_bpe
from lm_trainer.data.tokenizer.bytes import EOS_ID, ByteTokenizer
from tests.data.conftest import MakeBuild, contents
from tests.data.program import finish, start_builder
from tests.hangs import HANG_SECONDS


def tokens_of(build: Build) -> np.ndarray:
    """Reads the tokens with NumPy alone, by the documented format."""
    directory = Path(build.store.url)
    names = json.loads((directory / "ledger.json").read_text())["parts"]
    return np.concatenate([np.fromfile(directory / f"parts/{name}.bin", "<u2") for name in names])


def expected_tokens(documents: list[str]) -> np.ndarray:
    ordered = [text for first in range(3) for text in documents[first::3]]
    return np.concatenate([np.array([*text.encode(), EOS_ID], np.uint16) for text in ordered])


def test_holds_every_document_in_order_each_ended_by_eos(make_build: MakeBuild, documents: list[str]) -> None:
    build = make_build()
    ledger = build.run()
    tokens = tokens_of(build)
    np.testing.assert_array_equal(tokens, expected_tokens(documents))
    assert (tokens == EOS_ID).sum() == ledger.num_documents == len(documents)
    assert ledger.num_tokens == len(tokens)
    assert sum(ledger.text_bytes) == sum(len(text.encode()) for text in documents)
    assert ledger.finished
    assert len(ledger.parts) > 6, "the test needs several parts"


def test_records_describe_the_parts(make_build: MakeBuild) -> None:
    build = make_build()
    ledger = build.run()
    directory = Path(build.store.url)
    for name, tokens in zip(ledger.parts, ledger.tokens, strict=True):
        record = json.loads((directory / f"parts/{name}.json").read_text())
        for kind, blob in record["blobs"].items():
            content = (directory / f"parts/{name}.{kind}").read_bytes()
            assert (len(content), hashlib.sha256(content).hexdigest()) == (blob["bytes"], blob["sha256"])
        lengths = np.fromfile(directory / f"parts/{name}.len", "<u4")
        rows = np.fromfile(directory / f"parts/{name}.row", "<u4")
        assert lengths.sum() == tokens == record["tokens"]
        assert len(rows) == len(lengths) == record["documents"]
        assert rows.tolist() == list(range(record["rows"][1] - record["rows"][0]))
    assert not (directory / "builder.json").exists()


def test_parts_grow_to_their_largest_size(make_build: MakeBuild) -> None:
    ledger = make_build(part_bytes=(10_000, 40_000)).run()
    for shard in range(3):
        sizes = [
            size for name, size in zip(ledger.parts, ledger.text_bytes, strict=True) if name.startswith(f"{shard:05d}")
        ]
        for size, least in zip(sizes[:-1], [10_000, 20_000, *[40_000] * len(sizes)], strict=False):
            assert least <= size < least + 20_000, "no document here has more than 20,000 letters, but some bytes more"


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_any_number_of_workers_gives_the_same_bytes(
    make_build: MakeBuild, reference: dict[str, bytes], workers: int
) -> None:
    build = make_build(num_workers=workers)
    build.run()
    assert contents(Path(build.store.url)) == reference


def test_kills_change_nothing_and_cost_no_committed_part(
    corpus: Path, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    directory = tmp_path / "cache"
    claim = directory / "builder.json"
    for count in (2, 4, 6, 8):
        # More parts each time, so that every builder has committed something that the next one may lose.
        builder = start_builder(corpus, directory, delay=0.02, most_parts=count + 1)
        deadline = time.monotonic() + HANG_SECONDS
        while time.monotonic() < deadline:
            claimed = claim.exists() and json.loads(claim.read_text())["pid"] == builder.pid
            if claimed and len(list(directory.glob("parts/*.json"))) >= count:
                break
            time.sleep(0.005)
        assert builder.exitcode is None, "the builder was to be killed at work"
        builder.kill()
        builder.join()
    assert json.loads(claim.read_text())["pid"] == builder.pid
    committed = {path: path.stat().st_mtime_ns for path in directory.glob("parts/*.json")}
    assert len(committed) >= 8
    # By the heartbeat alone, as between machines, it would be taken for dead after an hour.
    finish(start_builder(corpus, directory, dead_seconds=3600))
    assert contents(directory) == reference
    assert all(path.stat().st_mtime_ns == changed for path, changed in committed.items())


def test_two_builders_at_once_give_the_same_bytes(corpus: Path, tmp_path: Path, reference: dict[str, bytes]) -> None:
    directory = tmp_path / "cache"
    builders = [start_builder(corpus, directory, delay=0.01) for _ in range(2)]
    for builder in builders:
        finish(builder)
    assert contents(directory) == reference


def test_two_builders_in_one_process_do_the_work_once(
    make_build: MakeBuild, reference: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    write = KvStore.write

    def slow_write(store: KvStore, key: str, value: bytes, **options: Any) -> bytes | None:
        written = write(store, key, value, **options)
        time.sleep(0.3 if key == BUILDER else 0)  # The other looks at the claim before its writer goes on.
        return written

    monkeypatch.setattr(KvStore, "write", slow_write)

    class Counting(ByteTokenizer):
        def encode_batch(self, texts: list[str]) -> list[Any]:
            # The other builder comes while this one is at work.
            time.sleep(0.1)
            encoded.extend(texts)
            return super().encode_batch(texts)

    builds = [make_build(tokenizer=Counting()) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        ledgers = list(pool.map(Build.run, builds))
    assert ledgers[0] == ledgers[1]
    assert contents(Path(builds[0].store.url)) == reference
    assert len(encoded) == ledgers[0].num_documents


def test_who_lags_behind_does_not_undo_the_ledger(make_build: MakeBuild) -> None:
    build = make_build()
    lagging = build.read_ledger()
    finished = build.run()
    lagging.advance(build.store, 1)
    lagging.write(build.store)
    assert build.read_ledger() == finished


def test_a_finished_cache_is_only_opened(make_build: MakeBuild) -> None:
    build = make_build()
    build.run()
    times = {path: path.stat().st_mtime_ns for path in Path(build.store.url).rglob("*") if path.is_file()}
    make_build().run()
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_wide_vocabularies_take_four_bytes() -> None:
    from lm_trainer.data.cache.format import token_dtype

    assert token_dtype(65_536) == np.dtype("<u2")
    assert token_dtype(65_537) == np.dtype("<u4")


def test_progress_reaches_the_size_of_the_text(make_build: MakeBuild, documents: list[str]) -> None:
    reports: list[BuildProgress] = []
    make_build().run(BuildCallbacks(on_progress=reports.append))
    assert reports[-1].done_bytes == sum(len(text.encode()) for text in documents)
    assert reports[-1].total_bytes is None, "a packed file hides how much text it holds"
    assert [p.done_bytes for p in reports] == sorted(p.done_bytes for p in reports)


def test_a_trained_tokenizer_never_makes_eos_of_text(make_build: MakeBuild, tmp_path: Path) -> None:
    texts = ["one<|endoftext|>two", "<|endoftext|>", "plain"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    urls = [str(tmp_path / "a.jsonl")]
    shards = DataConfig(train_urls=urls).shards("train")
    build = make_build(urls=urls, tokenizer=train_bpe(TrainedBpe(vocab_size=300), shards))
    assert build.run().num_documents == 3
    tokens = tokens_of(build)
    assert (tokens == build.tokenizer.eos_id).sum() == 3
    ends = np.flatnonzero(tokens == build.tokenizer.eos_id)
    assert [build.tokenizer.decode(piece.tolist()) for piece in np.split(tokens, ends + 1)[:-1]] == texts


def test_a_tokenizer_that_makes_eos_of_text_is_refused(make_build: MakeBuild) -> None:
    class Wrong(ByteTokenizer):
        @property
        def eos_id(self) -> int:
            return ord("e")

    with pytest.raises(UserError, match=r"a\.jsonl:1: the tokenizer makes its end-of-document token"):
        make_build(tokenizer=Wrong()).run()


def test_bos_starts_every_document(make_build: MakeBuild, documents: list[str]) -> None:
    class WithBos(ByteTokenizer):
        @property
        def bos_id(self) -> int:
            return 257

    build = make_build(tokenizer=WithBos())
    build.run()
    tokens = tokens_of(build)
    starts = np.flatnonzero(tokens == 257)
    assert len(starts) == len(documents)
    assert starts[0] == 0
    assert (tokens[starts[1:] - 1] == EOS_ID).all()


def test_a_large_file_is_one_document_over_several_parts(make_build: MakeBuild, tmp_path: Path) -> None:
    text = "some words to fill a line\n" * (4 * PIECE_BYTES // 26)
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("small")
    config = DataConfig(train_urls=[str(tmp_path / "*.txt")])
    build = replace(make_build(config=config, part_bytes=(PIECE_BYTES, PIECE_BYTES)), shards=config.shards("train"))
    ledger = build.run()
    assert ledger.num_documents == 2
    assert len(ledger.parts) > 2
    np.testing.assert_array_equal(tokens_of(build), [*text.encode(), EOS_ID, *b"small", EOS_ID])
    records = [json.loads((Path(build.store.url) / f"parts/{name}.json").read_text()) for name in ledger.parts]
    assert [record["open"] for record in records[:-1]] == [record["continues"] for record in records[1:]]
    assert records[0]["open"]
    assert not records[-1]["open"]


def test_a_build_goes_on_inside_a_document(make_build: MakeBuild, tmp_path: Path) -> None:
    class Failing(ByteTokenizer):
        calls = 0

        def encode_batch(self, texts):
            self.calls += 1
            if self.calls == 3:
                raise MachineError("stopped here")
            return super().encode_batch(texts)

    (tmp_path / "a.txt").write_text("some words to fill a line\n" * (5 * PIECE_BYTES // 26))
    options = {"urls": [str(tmp_path / "a.txt")], "part_bytes": (PIECE_BYTES, PIECE_BYTES)}
    uninterrupted = make_build("whole", **options)
    uninterrupted.run()
    with pytest.raises(MachineError, match="stopped here"):
        make_build(tokenizer=Failing(), **options).run()
    resumed = make_build(**options)
    resumed.run()
    assert contents(Path(resumed.store.url)) == contents(Path(uninterrupted.store.url))


def test_empty_documents_and_lone_surrogates(make_build: MakeBuild, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a"}\n{"text": ""}\n\n{"text": "b\\ud800c"}\n{"text": "\\ud83d\\ude00"}\n'
    )
    build = make_build(urls=[str(tmp_path / "a.jsonl")])
    ledger = build.run()
    assert (ledger.num_documents, ledger.empty, ledger.rows) == (3, 2, 5)
    expected = [*b"a", EOS_ID, *"b\ufffdc".encode(), EOS_ID, *"\U0001f600".encode(), EOS_ID]
    np.testing.assert_array_equal(tokens_of(build), expected)
    assert np.fromfile(Path(build.store.url) / "parts/00000-00000.row", "<u4").tolist() == [0, 3, 4]
