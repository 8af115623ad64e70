"""The cache: exact, reproducible to the byte, and never silently another one's."""

from __future__ import annotations

import ctypes
import gzip
import hashlib
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.data import DataConfig
from lm_trainer.data.builder import Build, BuildProgress
from lm_trainer.data.layout import Ledger
from lm_trainer.data.sources.text import PIECE_BYTES
from lm_trainer.data.store import Store
from lm_trainer.data.tokenizer import TrainedBpe, train_bpe
from lm_trainer.data.tokenizer.bytes import EOS_ID, ByteTokenizer
from tests.conftest import lmt_environment
from tests.data.conftest import MakeBuild, contents


def tokens_of(build: Build) -> np.ndarray:
    """Read with numpy alone, from the documented layout."""
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


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an undisturbed build in one process gives."""
    directory = tmp_path_factory.mktemp("reference")
    subprocess.run(builder_command(corpus, directory), env=lmt_environment(), check=True)
    return contents(directory)


def builder_command(corpus: Path, directory: Path, *, delay: float = 0.0) -> list[str]:
    return [sys.executable, __file__, str(corpus), str(directory), str(delay)]


@pytest.mark.parametrize("workers", [0, 1, 2])
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
    for kill in range(4):
        builder = subprocess.Popen(builder_command(corpus, directory, delay=0.02), env=lmt_environment())
        deadline = time.monotonic() + 60
        while len(list(directory.glob("parts/*.json"))) < 2 * (kill + 1) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert builder.poll() is None, "the builder was to be killed at work"
        builder.kill()
        builder.wait()
    assert json.loads((directory / "builder.json").read_text())["pid"] == builder.pid
    committed = {path: path.stat().st_mtime_ns for path in directory.glob("parts/*.json")}
    assert len(committed) >= 8
    started = time.monotonic()
    subprocess.run(builder_command(corpus, directory), env=lmt_environment(), check=True)
    assert time.monotonic() - started < 25, "a dead builder's lock does not hold up the next one"
    assert contents(directory) == reference
    assert all(path.stat().st_mtime_ns == changed for path, changed in committed.items())


def test_two_builders_at_once_give_the_same_bytes(corpus: Path, tmp_path: Path, reference: dict[str, bytes]) -> None:
    directory = tmp_path / "cache"
    builders = [
        subprocess.Popen(builder_command(corpus, directory, delay=0.01), env=lmt_environment()) for _ in range(2)
    ]
    assert [builder.wait(60) for builder in builders] == [0, 0]
    assert contents(directory) == reference


def test_a_finished_cache_is_only_opened(make_build: MakeBuild) -> None:
    build = make_build()
    build.run()
    before = {path: path.stat().st_mtime_ns for path in Path(build.store.url).rglob("*") if path.is_file()}
    make_build().run()
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_wide_vocabularies_take_four_bytes() -> None:
    from lm_trainer.data.layout import token_dtype

    assert token_dtype(65_536) == np.dtype("<u2")
    assert token_dtype(65_537) == np.dtype("<u4")


def test_progress_reaches_the_size_of_the_text(make_build: MakeBuild, documents: list[str]) -> None:
    seen: list[BuildProgress] = []
    build = make_build()
    build.on_progress = seen.append
    build.run()
    assert seen[-1].done_bytes == sum(len(text.encode()) for text in documents)
    assert seen[-1].total_bytes is None, "a packed file hides how much text it holds"
    assert [p.done_bytes for p in seen] == sorted(p.done_bytes for p in seen)


def test_a_trained_tokenizer_never_makes_eos_of_text(make_build: MakeBuild, tmp_path: Path) -> None:
    texts = ["one<|endoftext|>two", "<|endoftext|>", "plain"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    build = make_build(urls=[str(tmp_path / "a.jsonl")])
    build.tokenizer = train_bpe(TrainedBpe(vocab_size=300), build.shards)
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
    build = make_build(config=config, part_bytes=(PIECE_BYTES, PIECE_BYTES))
    build.shards = config.shards("train")
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
    whole = make_build("whole", **options)
    whole.run()
    with pytest.raises(MachineError, match="stopped here"):
        make_build(tokenizer=Failing(), **options).run()
    resumed = make_build(**options)
    resumed.run()
    assert contents(Path(resumed.store.url)) == contents(Path(whole.store.url))


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


class TestBadRows:
    @pytest.fixture
    def bad(self, tmp_path: Path) -> str:
        lines = ['{"text": "fine"}'] * 99 + ["{broken"]
        (tmp_path / "bad.jsonl").write_text("\n".join(lines) + "\n")
        return str(tmp_path / "bad.jsonl")

    def test_stop_the_build_by_default(self, make_build: MakeBuild, bad: str) -> None:
        with pytest.raises(UserError, match=r"bad\.jsonl:100: not JSON .*data\.on_bad_row: skip"):
            make_build(urls=[bad]).run()

    def test_are_skipped_within_a_bound(self, make_build: MakeBuild, bad: str) -> None:
        with pytest.raises(UserError):
            make_build(urls=[bad]).run()
        ledger = make_build(urls=[bad], raise_on_bad_row=False, max_bad_rows=0.01).run()
        assert (ledger.num_documents, ledger.bad) == (99, 1)
        assert "bad.jsonl:100" in ledger.bad_examples[0]

    def test_beyond_the_bound_are_an_error_each_time(self, make_build: MakeBuild, bad: str) -> None:
        for _ in range(2):
            with pytest.raises(UserError, match=r"1 of 100 rows .* are bad, more than data\.max_bad_rows \(0\.001\)"):
                make_build(urls=[bad], raise_on_bad_row=False, max_bad_rows=0.001).run()

    def test_of_an_older_build_are_not_accepted_silently(self, make_build: MakeBuild, bad: str) -> None:
        make_build(urls=[bad], raise_on_bad_row=False, max_bad_rows=0.5).run()
        with pytest.raises(UserError, match=r"was built with data\.on_bad_row: skip and leaves out 1 bad rows"):
            make_build(urls=[bad]).run()

    def test_in_the_middle_of_a_large_file_end_no_document(self, make_build: MakeBuild, tmp_path: Path) -> None:
        content = bytearray(b"some words to fill a line\n" * (4 * PIECE_BYTES // 26))
        content[2 * PIECE_BYTES + 7] = 0xFF
        (tmp_path / "a.txt").write_bytes(content)
        ledger = make_build(urls=[str(tmp_path / "a.txt")], raise_on_bad_row=False, max_bad_rows=0.5).run()
        assert (ledger.num_documents, ledger.bad) == (1, 1)


class TestAnotherCache:
    def test_another_tokenizer_is_refused(self, make_build: MakeBuild) -> None:
        first = make_build()
        first.run()
        other = train_bpe(TrainedBpe(vocab_size=300), first.shards)
        with pytest.raises(UserError) as caught:
            make_build(tokenizer=other).run()
        message = str(caught.value)
        assert "tokenizer.sha256: the cache has" in message
        assert ByteTokenizer().fingerprint()["sha256"] in message
        assert other.fingerprint()["sha256"] in message
        assert first.store.url in message

    def test_a_changed_source_is_refused(self, make_build: MakeBuild, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"text": "before"}\n')
        make_build(urls=[str(tmp_path / "a.jsonl")]).run()
        (tmp_path / "a.jsonl").write_text('{"text": "afterwards"}\n')
        with pytest.raises(UserError, match=r"a\.jsonl has changed since: it had 19 bytes .* now 23"):
            make_build(urls=[str(tmp_path / "a.jsonl")]).run()

    def test_another_text_key_is_refused(self, make_build: MakeBuild, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"text": "x", "body": "y"}\n')
        make_build(urls=[str(tmp_path / "a.jsonl")]).run()
        config = DataConfig(train_urls=[str(tmp_path / "a.jsonl")], text_key="body")
        with pytest.raises(UserError, match=r"'text_key': 'text'.*now.*'text_key': 'body'"):
            make_build(config=config).run()

    def test_fewer_or_more_sources_are_refused(self, make_build: MakeBuild, corpus: Path) -> None:
        make_build().run()
        with pytest.raises(UserError, match="shards: the cache has 3, now 1"):
            make_build(urls=[str(corpus / "a.jsonl")]).run()

    def test_a_repaired_file_that_nobody_read_is_built_again(
        self, make_build: MakeBuild, corpus: Path, documents: list[str], tmp_path: Path
    ) -> None:
        whole = (corpus / "b.jsonl.gz").read_bytes()
        (tmp_path / "a.jsonl").write_bytes((corpus / "a.jsonl").read_bytes())
        (tmp_path / "b.jsonl.gz").write_bytes(whole[: len(whole) // 20])
        urls = [str(tmp_path / "*.jsonl*")]
        with pytest.raises(UserError, match="truncated"):
            make_build(urls=urls).run()
        (tmp_path / "b.jsonl.gz").write_bytes(whole)
        ledger = make_build(urls=urls).run()
        assert ledger.num_documents == len(documents[0::3]) + len(documents[1::3])

    def test_a_repaired_file_that_may_have_been_read_is_refused(
        self, make_build: MakeBuild, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lm_trainer.data.builder.POLL_SECONDS", 0)
        whole = (corpus / "b.jsonl.gz").read_bytes()
        (tmp_path / "b.jsonl.gz").write_bytes(whole[: len(whole) * 3 // 4])
        urls = [str(tmp_path / "b.jsonl.gz")]
        with pytest.raises(UserError, match="truncated"):
            make_build(urls=urls, part_bytes=(5_000, 5_000)).run()
        (tmp_path / "b.jsonl.gz").write_bytes(whole)
        with pytest.raises(UserError, match=r"b\.jsonl\.gz has changed since"):
            make_build(urls=urls, part_bytes=(5_000, 5_000)).run()


class TestFailures:
    def test_a_bad_file_among_good_ones_is_named_and_the_good_ones_stay(
        self, make_build: MakeBuild, corpus: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "z.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 5000)[:-20])
        urls = [str(corpus / "a.jsonl"), str(tmp_path / "z.jsonl.gz")]
        for workers in (0, 2):
            build = make_build(f"cache{workers}", urls=urls, num_workers=workers)
            with pytest.raises(UserError, match=r"z\.jsonl\.gz is truncated"):
                build.run()
            assert not Ledger.read(build.store).finished
            assert not build.store.read("builder.json")

    def test_no_text_at_all(self, make_build: MakeBuild, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"text": ""}\n\n')
        with pytest.raises(UserError, match="the train data holds no text: 2 rows"):
            make_build(urls=[str(tmp_path / "a.jsonl")]).run()
        (tmp_path / "b.jsonl").write_text("")
        with pytest.raises(UserError, match="holds no text: 0 rows"):
            make_build("other", urls=[str(tmp_path / "b.jsonl")]).run()

    @pytest.mark.parametrize("name", ["file/cache", "/proc/cache"])
    def test_an_unwritable_directory(self, make_build: MakeBuild, tmp_path: Path, name: str) -> None:
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(UserError, match=r"data\.cache_dir") as caught:
            make_build(name).run()
        assert caught.value.exit_code == 2

    def test_a_damaged_ledger_is_named(self, make_build: MakeBuild) -> None:
        build = make_build()
        build.run()
        (Path(build.store.url) / "ledger.json").write_text('{"parts": [')
        with pytest.raises(UserError, match=r"ledger\.json is damaged"):
            make_build().run()

    def test_a_file_too_large_for_the_disk(self, make_build: MakeBuild, reference: dict[str, bytes]) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
        try:
            with pytest.raises(MachineError, match="the disk is full") as caught:
                make_build().run()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, handler)
        assert caught.value.exit_code == 1
        build = make_build()
        build.run()
        assert contents(Path(build.store.url)) == reference

    def test_a_full_disk(self, make_build: MakeBuild, small_disk: Path, reference: dict[str, bytes]) -> None:
        ballast = small_disk / "ballast"
        ballast.write_bytes(bytes(1_700_000))
        build = make_build()
        build.store = Store(str(small_disk / "cache"))
        with pytest.raises(MachineError, match="the disk is full"):
            build.run()
        committed = {path: path.read_bytes() for path in (small_disk / "cache/parts").glob("*.json")}
        assert committed
        ballast.unlink()
        build.run()
        assert contents(small_disk / "cache") == reference
        assert all(path.read_bytes() == content for path, content in committed.items())

    def test_a_killed_worker_ends_the_build(self, make_build: MakeBuild, monkeypatch: pytest.MonkeyPatch) -> None:
        import lm_trainer.data.builder as builder

        def kill_children(jobs: object, workers: int, tick: object) -> None:
            def kill() -> None:
                for child in multiprocessing.active_children():
                    os.kill(child.pid or 0, signal.SIGKILL)

            run_in_processes(jobs, workers, kill)  # pyright: ignore[reportArgumentType]

        run_in_processes = builder.run_in_processes
        monkeypatch.setattr(builder, "run_in_processes", kill_children)
        with pytest.raises(MachineError, match="was killed"):
            make_build(num_workers=2).run()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = sys.platform == "linux" and libc.mount(b"tmpfs", bytes(directory), b"tmpfs", 0, b"size=2m") == 0
    if not mounted:
        pytest.skip("mounting a small file system is not permitted here")
    yield directory
    libc.umount2(bytes(directory), 2)


class SlowBytes(ByteTokenizer):
    """Leaves time to be killed."""

    delay = 0.0

    def encode_batch(self, texts):
        time.sleep(self.delay)
        return super().encode_batch(texts)


def main(corpus: Path, directory: Path, delay: float) -> None:
    """Builds `corpus` as `make_build` does, in a process that can be killed."""
    from lm_trainer.data.builder import BuildOptions
    from tests.data.conftest import PART_BYTES, one_per_file

    SlowBytes.delay = delay
    shards = one_per_file(DataConfig(train_urls=[str(corpus / "*.jsonl*")]))
    options = BuildOptions(num_workers=0, part_bytes=PART_BYTES)
    Build("train", Store(str(directory)), shards, SlowBytes(), options).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
