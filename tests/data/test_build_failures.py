"""Builds that refuse, fail or are killed, and the files that they leave behind."""

from __future__ import annotations

import ctypes
import gzip
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.data import DataConfig
from lm_trainer.data.cache.documents import document_lengths
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.sources.text import PIECE_BYTES
from lm_trainer.data.tokenize.progress import BuildCallbacks
from lm_trainer.data.tokenizer import TrainedBpe, train_bpe
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from tests.data.conftest import MakeBuild, contents
from tests.data.program import Sleepy, start_builder
from tests.hangs import HANG_SECONDS


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

    @pytest.mark.parametrize(
        ("places", "count"), [((0.5,), 2), ((0.0,), 1), ((0.99,), 1), ((0.2, 0.7), 3), ((0.4, 0.5), 2)]
    )
    def test_in_a_large_text_file_end_the_document(
        self, make_build: MakeBuild, tmp_path: Path, places: tuple[float, ...], count: int
    ) -> None:
        content = bytearray(b"some words to fill a line\n" * (8 * PIECE_BYTES // 26))
        for position in places:
            content[int(position * len(content))] = 0xFF
        (tmp_path / "a.txt").write_bytes(content)
        options = {"urls": [str(tmp_path / "a.txt")], "raise_on_bad_row": False, "max_bad_rows": 0.9}
        build = make_build(**options)
        ledger = build.run()
        assert ledger.num_documents == count
        assert 1 <= ledger.bad <= len(places)
        assert len(document_lengths(build.store, ledger)) == count
        assert document_lengths(build.store, ledger).sum() == ledger.num_tokens
        parts = make_build("parts", **options, part_bytes=(PIECE_BYTES, PIECE_BYTES)).run()
        assert (parts.num_documents, parts.num_tokens) == (count, ledger.num_tokens)


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
        content = (corpus / "b.jsonl.gz").read_bytes()
        (tmp_path / "a.jsonl").write_bytes((corpus / "a.jsonl").read_bytes())
        (tmp_path / "b.jsonl.gz").write_bytes(content[: len(content) // 20])
        urls = [str(tmp_path / "*.jsonl*")]
        with pytest.raises(UserError, match="truncated"):
            make_build(urls=urls).run()
        (tmp_path / "b.jsonl.gz").write_bytes(content)
        ledger = make_build(urls=urls).run()
        assert ledger.num_documents == len(documents[0::3]) + len(documents[1::3])

    def test_a_repaired_file_that_may_have_been_read_is_refused(
        self, make_build: MakeBuild, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lm_trainer.data.tokenize.build.POLL_SECONDS", 0)
        # Larger than the bytes that are unpacked at once, so that something has been read before the end is missed.
        text = random.Random(0).randbytes(4 << 20).hex()
        lines = (json.dumps({"text": text[i : i + 10_000]}) + "\n" for i in range(0, len(text), 10_000))
        content = gzip.compress("".join(lines).encode(), 1)
        (tmp_path / "b.jsonl.gz").write_bytes(content[: len(content) * 3 // 4])
        urls = [str(tmp_path / "b.jsonl.gz")]
        with pytest.raises(UserError, match="truncated"):
            make_build(urls=urls, part_bytes=(1_000_000, 1_000_000)).run()
        (tmp_path / "b.jsonl.gz").write_bytes(content)
        with pytest.raises(UserError, match=r"b\.jsonl\.gz has changed since"):
            make_build(urls=urls, part_bytes=(1_000_000, 1_000_000)).run()


class TestALostManifest:
    def test_is_refused_whatever_is_asked_for(self, make_build: MakeBuild, corpus: Path) -> None:
        build = make_build()
        build.run()
        (Path(build.store.url) / "manifest.json").unlink()
        for urls in (None, [str(corpus / "a.jsonl")]):
            with pytest.raises(MachineError, match=r"manifest\.json is missing, .*; remove .*/cache to build it again"):
                make_build(urls=urls).run()

    def test_leaves_nothing_of_parts_that_no_ledger_lists(self, make_build: MakeBuild, corpus: Path) -> None:
        build = make_build(urls=[str(corpus / "c.jsonl")])
        build.run()
        for name in ("manifest.json", "ledger.json"):
            (Path(build.store.url) / name).unlink()
        make_build(urls=[str(corpus / "a.jsonl")]).run()
        alone = make_build("alone", urls=[str(corpus / "a.jsonl")])
        alone.run()
        assert contents(Path(build.store.url)) == contents(Path(alone.store.url))


class TestASourceThatChangesMeanwhile:
    """Batches of one row, so that a file can change between two of them."""

    @pytest.fixture
    def change(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Grows by a line when the document `now` has been encoded."""
        file = tmp_path / "b.jsonl"
        encode = ByteTokenizer.encode_batch

        def encode_batch(self: ByteTokenizer, texts: list[str]) -> list[object]:
            if any(text.startswith("now") for text in texts):
                with file.open("a") as stream:
                    stream.write('{"text": "late"}\n')
            return encode(self, texts)

        monkeypatch.setattr(ByteTokenizer, "encode_batch", encode_batch)
        monkeypatch.setattr("lm_trainer.data.tokenize.shard_reader.BATCH_ROWS", 1)
        monkeypatch.setattr("lm_trainer.data.tokenize.build.POLL_SECONDS", 0)
        return file

    @staticmethod
    def lines(*texts: str) -> str:
        return "".join(json.dumps({"text": text}) + "\n" for text in texts)

    def test_gives_no_cache(self, make_build: MakeBuild, change: Path, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text(self.lines("first", "second"))
        change.write_text(self.lines("now", *(f"document {i}" for i in range(9))))
        urls = [str(tmp_path / "a.jsonl"), str(change)]
        build = make_build(urls=urls)
        with pytest.raises(UserError, match=r"b\.jsonl changed while it was tokenised: it had 2\d+ bytes .*Nothing of"):
            build.run()
        assert not Ledger.read(build.store).finished
        assert build.store.list("shards") == ["00000.json"]

    def test_that_nobody_had_read_is_built_again(
        self, make_build: MakeBuild, change: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # More than are read ahead: what changes behind the last row that is read changes nothing.
        change.write_text(self.lines("now", *(f"and then {i}" for i in range(9))))
        with pytest.raises(UserError, match="Nothing of it is kept; start again"):
            make_build(urls=[str(change)]).run()
        monkeypatch.undo()
        assert make_build(urls=[str(change)]).run().num_documents == 11

    def test_keeps_only_parts_of_what_it_was(
        self, make_build: MakeBuild, change: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old_rows = [f"before {i} " * 100 for i in range(50)]
        change.write_text(self.lines(*old_rows, "now", *(f"after {i} " * 100 for i in range(20))))
        urls, old = [str(change)], change.read_bytes()
        times = change.stat()
        build = make_build(urls=urls, part_bytes=(2000, 2000))
        with pytest.raises(UserError, match=r"What was kept is from before; .* another data\.cache_dir, or remove"):
            build.run()
        assert build.store.list("parts"), "something was committed before the file changed"
        monkeypatch.undo()
        with pytest.raises(UserError, match=r"b\.jsonl has changed since: .*\n.*Set data\.cache_dir to another"):
            make_build(urls=urls, part_bytes=(2000, 2000)).run()
        # The parts that were kept are of the old file alone: with that in its place again, the cache is that of the old
        # file.
        change.write_bytes(old)
        os.utime(change, ns=(times.st_atime_ns, times.st_mtime_ns))
        make_build(urls=urls, part_bytes=(2000, 2000)).run()
        make_build("other", urls=urls, part_bytes=(2000, 2000)).run()
        caches = [contents(Path(make_build(name).store.url)) for name in ("cache", "other")]
        assert caches[0] == caches[1]


class TestFailures:
    @pytest.mark.slow
    def test_a_bad_file_among_good_ones_is_named_and_the_good_ones_stay(
        self, make_build: MakeBuild, corpus: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "z.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 5000)[:-20])
        urls = [str(corpus / "a.jsonl"), str(tmp_path / "z.jsonl.gz")]
        for workers in (0, 2):
            build = make_build(f"cache{workers}", urls=urls, num_workers=workers)
            with pytest.raises(UserError, match=r"z\.jsonl\.gz is damaged"):
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

    def test_paths_of_the_store_are_readable(self) -> None:
        with pytest.raises(UserError, match=r'directory: "/proc/new é \[1\]/train/builder.json": No such') as caught:
            KvStore("/proc/new é [1]/train").write("builder.json", b"{}")
        assert "\\x" not in str(caught.value)

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
        # Leaves room for some parts of the cache, and not for all.
        ballast.write_bytes(bytes(1_700_000))
        build = make_build(store=KvStore(str(small_disk / "cache")))
        with pytest.raises(MachineError, match="the disk is full"):
            build.run()
        committed = {path: path.read_bytes() for path in (small_disk / "cache/parts").glob("*.json")}
        assert committed
        ballast.unlink()
        build.run()
        assert contents(small_disk / "cache") == reference
        assert all(path.read_bytes() == content for path, content in committed.items())

    def test_a_killed_worker_ends_the_build(self, make_build: MakeBuild, monkeypatch: pytest.MonkeyPatch) -> None:
        import lm_trainer.data.tokenize.build as builder

        def kill_children(jobs: object, workers: int, tick: object) -> None:
            def kill() -> None:
                for child in multiprocessing.active_children() if build.store.list("parts") else ():
                    os.kill(child.pid or 0, signal.SIGKILL)

            run_in_processes(jobs, workers, kill)  # pyright: ignore[reportArgumentType]

        run_in_processes = builder.run_in_processes
        monkeypatch.setattr(builder, "run_in_processes", kill_children)
        build = make_build(num_workers=1, tokenizer=Sleepy())
        with pytest.raises(MachineError, match="was killed"):
            build.run()

    @pytest.mark.slow
    def test_a_builder_that_dies_while_another_run_waits_is_replaced(
        self, make_build: MakeBuild, corpus: Path, tmp_path: Path, reference: dict[str, bytes]
    ) -> None:
        directory = tmp_path / "cache"
        builder = start_builder(corpus, directory, delay=0.2)
        deadline = time.monotonic() + HANG_SECONDS
        while not list(directory.glob("parts/*.json")) and time.monotonic() < deadline:
            time.sleep(0.01)
        waiting = make_build()
        # Late enough for the other one to have found it at work.
        killer = threading.Timer(0.5, builder.kill)
        token_counts: list[int] = []
        callbacks = BuildCallbacks(on_progress=lambda progress: token_counts.append(progress.tokens))
        killer.start()
        ledger = waiting.run(callbacks)
        builder.join()
        assert builder.exitcode == -signal.SIGKILL, "it was to be killed while it built"
        assert token_counts[0] < ledger.num_tokens, "the progress of the other one is shown"
        assert contents(directory) == reference


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
    # 2 is MNT_DETACH: a file that is still open would make a plain unmount fail.
    libc.umount2(bytes(directory), 2)
