"""Sources of records: Parquet, JSON arrays, lists in memory, and files far away."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.data import DataConfig
from lm_trainer.data.sources import BadRow, Row, list_shards
from lm_trainer.data.sources.in_memory import InMemory
from tests.conftest import lmt_environment
from tests.data.test_sources import COMPRESS, rows_of, texts, zstd

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

COUNT_THREADS = """
import os, sys
import pyarrow.parquet
from lm_trainer.data.sources import list_shards

def threads():
    return len(os.listdir("/proc/self/task"))

(shard,) = list_shards("train", [sys.argv[1]], "text")
pyarrow.array(["x"])
before = threads()
print(sum(1 for _ in shard.rows()), before, threads())
"""


def write(path: Path | str, **columns: list) -> None:
    parquet.write_table(pyarrow.table(columns), path, row_group_size=3)


class TestParquet:
    def test_rows_of_several_files_and_row_groups_in_order(self, tmp_path: Path) -> None:
        write(tmp_path / "a.parquet", text=[f"a{i}" for i in range(7)], n=list(range(7)))
        write(tmp_path / "b.parquet", text=["b0", "b1"])
        rows = rows_of(tmp_path / "*.parquet")
        assert texts(rows) == ["a0", "a1", "a2", "a3", "a4", "a5", "a6", "b0", "b1"]
        assert [row.number for row in rows] == list(range(9))
        assert rows[8].where == f"{tmp_path}/b.parquet:2"

    @pytest.mark.parametrize("start", [0, 2, 3, 4, 6, 7, 8, 9])
    def test_resumes_at_any_row(self, tmp_path: Path, start: int) -> None:
        write(tmp_path / "a.parquet", text=[f"a{i}" for i in range(7)])
        write(tmp_path / "b.parquet", text=["b0", "b1"])
        assert rows_of(tmp_path / "*.parquet", start=start) == rows_of(tmp_path / "*.parquet")[start:]

    @pytest.mark.parametrize("ending", COMPRESS)
    def test_compressed_as_a_whole(self, tmp_path: Path, ending: str) -> None:
        write(tmp_path / "plain", text=[f"a{i}" for i in range(7)])
        (tmp_path / f"a.parquet{ending}").write_bytes(COMPRESS[ending]((tmp_path / "plain").read_bytes()))
        assert texts(rows_of(tmp_path / f"a.parquet{ending}", start=2)) == ["a2", "a3", "a4", "a5", "a6"]

    def test_reads_only_the_row_groups_and_columns_that_it_needs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tmp_path / "a.parquet", text=[f"a{i}" for i in range(9)], other=["x"] * 9)
        reads = []
        iterate = parquet.ParquetFile.iter_batches

        def spy(self, *args, **options):
            reads.append((list(options["row_groups"]), options["columns"]))
            return iterate(self, *args, **options)

        monkeypatch.setattr(parquet.ParquetFile, "iter_batches", spy)
        assert texts(rows_of(tmp_path / "a.parquet", start=7)) == ["a7", "a8"]
        assert reads == [([2], ["text"])]

    def test_no_thread_outlives_the_reading(self, tmp_path: Path) -> None:
        """A thread of Arrow that still holds the open file when Python ends aborts the process."""
        write(tmp_path / "a.parquet", text=["x"] * 9)
        counted = subprocess.run(
            [sys.executable, "-c", COUNT_THREADS, tmp_path / "a.parquet"],
            env=lmt_environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        rows, threads_before, threads_after = map(int, counted.stdout.split())
        assert rows == 9
        assert threads_before == threads_after

    def test_bad_values_are_named(self, tmp_path: Path) -> None:
        broken = pyarrow.Array.from_buffers(
            pyarrow.string(),
            3,
            [
                None,
                pyarrow.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, 1, 3, 4))),
                pyarrow.py_buffer(b"a\xff\xfeb"),
            ],
        )
        parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "a.parquet")
        write(tmp_path / "b.parquet", text=["fine", None])
        first, bad, last, fine, null = rows_of(tmp_path / "*.parquet")
        assert texts([first, last, fine]) == ["a", "b", "fine"]
        assert isinstance(bad, BadRow)
        assert "invalid UTF-8" in bad.reason
        assert bad.where == f"{tmp_path}/a.parquet:2"
        assert isinstance(null, BadRow)
        assert "is null, not a string" in null.reason

    def test_another_column_or_none(self, tmp_path: Path) -> None:
        write(tmp_path / "a.parquet", body=["x"], n=[1])
        assert texts(rows_of(tmp_path / "a.parquet", text_key="body")) == ["x"]
        with pytest.raises(UserError, match=r"has no column 'text' \(columns: body, n\)"):
            rows_of(tmp_path / "a.parquet")

    @pytest.mark.parametrize("keep", [5, 200])
    def test_damaged_files_are_named(self, tmp_path: Path, keep: int) -> None:
        write(tmp_path / "a.parquet", text=["some text"] * 100)
        (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:keep])
        with pytest.raises(UserError, match=r"a\.parquet is truncated or damaged"):
            rows_of(tmp_path / "a.parquet")

    def test_damage_inside_is_found_while_reading(self, tmp_path: Path) -> None:
        parquet.write_table(
            pyarrow.table({"text": [f"some text {i}" for i in range(1000)]}),
            tmp_path / "a.parquet",
            compression="gzip",
        )
        content = bytearray((tmp_path / "a.parquet").read_bytes())
        content[100:400] = bytes(300)
        (tmp_path / "a.parquet").write_bytes(content)
        with pytest.raises(UserError, match=r"a\.parquet is damaged: "):
            rows_of(tmp_path / "a.parquet")

    @pytest.mark.parametrize(
        ("error", "message"),
        [
            (pyarrow.ArrowNotImplementedError("LZO"), "is written in a way that pyarrow does not read: LZO"),
            (pyarrow.ArrowMemoryError("malloc"), "there is too little memory to read .*: malloc"),
            (ConnectionResetError(104, "reset by peer"), "cannot read .*reset by peer"),
            (OSError("Corrupt snappy compressed data."), "is damaged: Corrupt snappy"),
        ],
    )
    def test_what_cannot_be_read_is_not_always_damaged(
        self, tmp_path: Path, error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise error

        write(tmp_path / "a.parquet", text=["x"])
        monkeypatch.setattr(parquet.ParquetFile, "iter_batches", fail)
        with pytest.raises(UserError, match=message):
            rows_of(tmp_path / "a.parquet")

    def test_several_fields(self, tmp_path: Path) -> None:
        write(tmp_path / "a.parquet", prompt=["p"], ids=[[1, 2]], other=[0])
        (shard,) = list_shards("train", [str(tmp_path / "a.parquet")], "text", ("prompt", "ids"))
        (row,) = shard.rows()
        assert isinstance(row, Row)
        assert (row.text, row.record) == ("", {"prompt": "p", "ids": [1, 2]})


class TestJsonArrays:
    def test_an_array_of_objects(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_text(json.dumps([{"text": "one"}, {"text": 2}, {"text": "three"}], indent=1))
        rows = rows_of(tmp_path / "a.json")
        assert texts([rows[0], rows[2]]) == ["one", "three"]
        assert isinstance(rows[1], BadRow)
        assert rows[1].where == f"{tmp_path}/a.json[1]"
        assert rows_of(tmp_path / "a.json", start=1) == rows[1:]

    def test_lines_under_the_same_ending(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_text('{"text": "one"}\n{"text": "two"}\n')
        assert texts(rows_of(tmp_path / "a.json")) == ["one", "two"]

    def test_a_broken_array_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_text('[\n{"text": "one"},\n')
        with pytest.raises(UserError, match=r"a\.json begins like an array of JSON objects"):
            rows_of(tmp_path / "a.json")

    @pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
    @pytest.mark.parametrize("content", [{"text": "one"}, [{"text": "one"}]])
    def test_json_over_several_lines_is_named(self, tmp_path: Path, name: str, content: Any) -> None:
        (tmp_path / name).write_text(json.dumps(content, indent=1))
        first = rows_of(tmp_path / name)[0]
        if name == "a.json" and isinstance(content, list):
            assert texts([first]) == ["one"]
        else:
            assert isinstance(first, BadRow)
            assert first.where == f"{tmp_path}/{name}:1"
            assert first.reason.startswith("a bracket alone: the file holds neither a whole object on each line nor")


class TestInMemory:
    def test_documents_and_held_out_documents(self) -> None:
        config = DataConfig(source=InMemory(train=["one", {"text": "two"}, {"body": "x"}], validation=["three"]))
        (shard,) = config.shards("train")
        first, second, bad = shard.rows()
        assert texts([first, second]) == ["one", "two"]
        assert isinstance(bad, BadRow)
        assert bad.where == "data.source.train[2]"
        assert list(pickle.loads(pickle.dumps(shard)).rows(1)) == [second, bad]
        assert texts(list(config.shards("validation")[0].rows())) == ["three"]
        assert DataConfig(source=InMemory(train=["one"])).shards("validation") == []

    def test_identity_is_that_of_the_documents(self) -> None:
        one, equal, other = (InMemory(train=[t]).shards("train")[0].identity() for t in ("a", "a", "b"))
        assert one == equal != other


def test_zst_of_several_frames_and_of_files_that_are_none_or_cut_short(tmp_path: Path) -> None:
    frames = [zstd(f'{{"text": "{i}"}}\n'.encode()) for i in range(3)]
    (tmp_path / "frames.jsonl.zst").write_bytes(b"".join(frames))
    assert texts(rows_of(tmp_path / "frames.jsonl.zst")) == ["0", "1", "2"]
    content = zstd("".join(json.dumps({"text": f"{i} {i * i}"}) + "\n" for i in range(10_000)).encode())
    (tmp_path / "a.jsonl.zst").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"a\.jsonl\.zst is damaged: truncated"):
        rows_of(tmp_path / "a.jsonl.zst")
    (tmp_path / "b.jsonl.zst").write_text('{"text": "not packed"}\n')
    with pytest.raises(UserError, match=r"b\.jsonl\.zst is damaged: .*Unknown frame descriptor"):
        rows_of(tmp_path / "b.jsonl.zst")


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_files_behind_a_url(tmp_path: Path, protocol: str) -> None:
    root = f"file://{tmp_path}" if protocol == "file" else "memory://records"
    with fsspec.open(f"{root}/a.parquet", "wb") as file:
        parquet.write_table(pyarrow.table({"text": ["far", "away"]}), file)
    with fsspec.open(f"{root}/b.jsonl.zst", "wb") as file:
        file.write(zstd(b'{"text": "packed"}\n'))  # pyright: ignore[reportAttributeAccessIssue]
    shards = list_shards("train", [f"{root}/*.parquet", f"{root}/b.jsonl.zst"], "text")
    assert texts([row for shard in shards for row in shard.rows()]) == ["far", "away", "packed"]
    assert all(file["version"] for shard in shards for file in shard.identity()["files"]) or protocol == "memory"


def test_the_first_link_of_a_chained_url_names_the_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("a.jsonl.zstd", zstd(b'{"text": "packed"}\n'))
        archive.writestr("b.jsonl", b'{"text": "plain"}\n')
    for link, text in {"a.jsonl.zstd": "packed", "b.jsonl": "plain"}.items():
        assert texts(rows_of(f"zip://{link}::file://{tmp_path}/all.zip")) == [text]
        assert texts(rows_of(f"simplecache::zip://{link}::file://{tmp_path}/all.zip")) == [text]


def test_fields_of_text_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"data\.format reads the fields prompt, but .*a\.txt is text without fields"):
        list_shards("train", [str(tmp_path / "a.txt")], "text", ("prompt",))
