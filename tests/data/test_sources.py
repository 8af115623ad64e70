"""Sources: their files, their rows, and the errors of both."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from lm_trainer.core.errors import UserError
from lm_trainer.data import DataConfig
from lm_trainer.data.sources import BadRow, Row, list_shards
from lm_trainer.data.sources.embedded import Embedded
from lm_trainer.data.sources.files import File, group_files
from lm_trainer.data.sources.jsonl import JsonLines
from lm_trainer.data.sources.text import PIECE_BYTES
from lm_trainer.data.sources.urls import expand_braces
from tests.conftest import lmt_environment


def rows_of(*urls: object, text_key: str = "text", start: int = 0) -> list[Row | BadRow]:
    shards = list_shards("train", [str(url) for url in urls], text_key)
    assert len(shards) == 1
    return list(shards[0].rows(start))


def texts(rows: list[Row | BadRow]) -> list[str]:
    assert all(isinstance(row, Row) for row in rows), rows
    return [row.text for row in rows if isinstance(row, Row)]


def zstd(content: bytes) -> bytes:
    return pytest.importorskip("zstandard").compress(content)


def zip_bytes(content: bytes) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("whatever", content)
    return archive.getvalue()


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".gzip": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".lzma": lambda content: lzma.compress(content, lzma.FORMAT_ALONE),
    ".zst": zstd,
    ".zstd": zstd,
    ".zip": zip_bytes,
}


def test_braces_expand_as_in_a_shell() -> None:
    assert expand_braces("x.{1..3}-of-3.gz") == ["x.1-of-3.gz", "x.2-of-3.gz", "x.3-of-3.gz"]
    assert expand_braces("{08..10}") == ["08", "09", "10"]
    assert expand_braces("{a,b}/{2..1}") == ["a/2", "a/1", "b/2", "b/1"]
    assert expand_braces("{plain}/x") == ["{plain}/x"]
    assert len(expand_braces("train.{1..128}-of-128.jsonl.gz")) == 128


def test_small_files_share_a_shard_and_large_ones_have_their_own() -> None:
    files = [File(str(index), size, "") for index, size in enumerate([10, 20, 200, 30, 60, 50])]
    assert [[int(f.url) for f in run] for run in group_files(files, 100)] == [[0, 1], [2], [3, 4], [5]]


@pytest.mark.parametrize("ending", ["", *COMPRESS])
@pytest.mark.parametrize("typed", [False, True], ids=["by name", "by type"])
def test_lines_of_json(tmp_path: Path, ending: str, typed: bool) -> None:
    lines = [json.dumps({"text": "one\ntwo"}), "", json.dumps({"text": "ünï", "x": [1]})]
    file = tmp_path / f"a.jsonl{ending}"
    file.write_bytes(COMPRESS.get(ending, bytes)("\n".join(lines).encode()))
    rows = list(JsonLines().shards("train", [str(file)])[0].rows()) if typed else rows_of(file)
    assert texts(rows) == ["one\ntwo", "", "ünï"]
    assert [row.number for row in rows] == [0, 1, 2]
    assert [row.where.rpartition(":")[2] for row in rows] == ["1", "2", "3"]


def test_rows_resume_at_a_number_across_files(tmp_path: Path) -> None:
    for name, words in {"a": "0 1 2", "b": "3 4"}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": word}) + "\n" for word in words.split()))
    assert texts(rows_of(tmp_path / "*.jsonl")) == ["0", "1", "2", "3", "4"]
    remaining = rows_of(tmp_path / "*.jsonl", start=2)
    assert texts(remaining) == ["2", "3", "4"]
    assert remaining[1].where.endswith("b.jsonl:1")
    assert [row.number for row in remaining] == [2, 3, 4]


def test_another_text_key(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x", "text": "y"}\n')
    assert texts(rows_of(tmp_path / "a.jsonl", text_key="body")) == ["x"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a', "not JSON"),
        (b'{"text": "\xff"}', "invalid UTF-8 at byte 10"),
        (b'{"body": "a"}', "no field 'text' (fields: body)"),
        (
            b'{"prompt": "a", "chosen": "b", "rejected": "c"}',
            "pairs of answers are read by data.format: {type: preference}",
        ),
        (b'{"text": null}', "is null, not a string"),
        (b'{"text": 3}', "is a number, not a string"),
        (b'{"text": ["a"]}', "is a list, not a string"),
        (b'["a"]', "expected an object with the field 'text', found a list"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: bytes, reason: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b'\n{"text": "fine too"}\n')
    good, bad, last = rows_of(tmp_path / "a.jsonl")
    assert isinstance(bad, BadRow)
    assert reason in bad.reason
    assert bad.where == f"{tmp_path}/a.jsonl:2"
    assert texts([good, last]) == ["fine", "fine too"]


def test_a_text_file_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\n".encode())
    (tmp_path / "b.md").write_text("# Title\n")
    rows = rows_of(tmp_path / "a.txt", tmp_path / "b.md")
    assert texts(rows) == ["one\r\ntwo\n", "# Title\n"], "line ends are kept, a byte order mark is not"
    assert all(isinstance(row, Row) and row.ends_document for row in rows)


@pytest.mark.parametrize("line", ["def f():\n    return 'é'\n", "without any line end é "])
def test_a_large_text_file_comes_in_pieces_of_one_document(tmp_path: Path, line: str) -> None:
    text = line * (5 * PIECE_BYTES // len(line.encode()))
    (tmp_path / "a.txt").write_text(text)
    rows = rows_of(tmp_path / "a.txt")
    assert 3 <= len(rows) <= 6
    assert [row.ends_document for row in rows] == [False] * (len(rows) - 1) + [True]
    assert "".join(texts(rows)) == text
    assert max(len(piece.encode()) for piece in texts(rows)) <= 2 * PIECE_BYTES
    if "\n" in line:
        assert all(piece.startswith("def") for piece in texts(rows))
    assert rows_of(tmp_path / "a.txt", start=2) == rows[2:]


def test_broken_utf8_in_a_text_file_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo \xff\xfe three\n")
    (row,) = rows_of(tmp_path / "a.txt")
    assert isinstance(row, BadRow)
    assert row.where == f"{tmp_path}/a.txt:2"
    assert "invalid UTF-8" in row.reason


def test_binary_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("text".encode("utf-16"))
    with pytest.raises(UserError, match=r"a\.txt is not text: it holds zero bytes"):
        rows_of(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("length", "suffix"), [(2000, b""), (10, b"\xff" * 4000), (2000, bytes(4000))], ids=["cut", "no block", "zeros"]
)
def test_a_damaged_gzip_is_named(tmp_path: Path, length: int, suffix: bytes) -> None:
    content = gzip.compress("".join(json.dumps({"text": str(i)}) + "\n" for i in range(1000)).encode())
    assert len(content) > length
    (tmp_path / "a.jsonl.gz").write_bytes(content[:length] + suffix)
    with pytest.raises(UserError, match=r"a\.jsonl\.gz is damaged"):
        rows_of(tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize("tail", [b"g", b"garbage", b"garbage" * 100])
def test_something_after_the_end_of_a_gzip_is_damage(tmp_path: Path, tail: bytes) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 1000) + tail)
    with pytest.raises(UserError, match=r"a\.jsonl\.gz is damaged: .*(followed by something else|Not a gzipped file)"):
        rows_of(tmp_path / "a.jsonl.gz")


def test_something_else_named_gz_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_text('{"text": "not packed"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl\.gz is damaged"):
        rows_of(tmp_path / "a.jsonl.gz")


def test_missing_files_are_named_with_a_near_one(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(
        UserError, match=r"data\.train_urls: there is no file .*trian\.jsonl; did you mean .*train\.jsonl\?"
    ):
        rows_of(tmp_path / "trian.jsonl")
    with pytest.raises(UserError, match=r"no file matches .*\*\.json"):
        rows_of(tmp_path / "*.json")
    with pytest.raises(UserError, match=r"the directory .* does not exist either"):
        rows_of(tmp_path / "no" / "x.jsonl")
    (tmp_path / "sub.jsonl").mkdir()
    with pytest.raises(UserError, match=r"there is no file .*train\.dat; did you mean .*train\.jsonl\?"):
        rows_of(tmp_path / "train.dat")


@pytest.mark.parametrize("name", ["sub.jsonl", "sub", "sub/"])
def test_a_directory_is_named_as_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    inside = f"{tmp_path}/{name.rstrip('/')}/*.jsonl"
    with pytest.raises(UserError, match=rf"is a directory; write which files in it, such as {re.escape(inside)}$"):
        rows_of(f"{tmp_path}/{name}")


def test_the_files_that_a_glob_finds_say_how_to_read_them(tmp_path: Path) -> None:
    line = '{"text": "x"}\n'
    (tmp_path / "a-0.jsonl").write_text(line)
    (tmp_path / "a-1.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    (tmp_path / "a-2.json").write_text(line)
    (tmp_path / "sub.txt").mkdir()
    for url, count in {"*": 3, "a-*.gz": 1, "a-{0..1}.jsonl*": 2, "a-[02].*": 2}.items():
        assert texts(rows_of(tmp_path / url)) == ["x"] * count, url
    (tmp_path / "b.txt").write_text("x")
    pattern = rf"{tmp_path}/\* matches files that are read in different ways, .*/a-2\.json and .*/b\.txt"
    with pytest.raises(UserError, match=rf"data\.train_urls: {pattern}; list them apart"):
        rows_of(tmp_path / "*")
    shards = list_shards("train", [f"{tmp_path}/{{b,a-0}}.*"], "text")
    assert [row.where.rpartition("/")[2] for shard in shards for row in shard.rows()] == ["b.txt", "a-0.jsonl:1"]
    (tmp_path / "c.dat").write_text("x")
    with pytest.raises(UserError, match=r"cannot tell from its name how to read .*/c\.dat \(known: "):
        rows_of(tmp_path / "*")


def test_a_file_listed_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(UserError, match="listed twice"):
        rows_of(tmp_path / "a.jsonl", tmp_path / "*.jsonl")


def test_a_file_listed_by_two_paths_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "data")
    file = tmp_path / "data" / "a.jsonl"
    file.write_text('{"text": "x"}\n')
    (tmp_path / "b.txt").write_text("y")
    monkeypatch.chdir(tmp_path)
    spellings = ["./data/a.jsonl", "data/../data/a.jsonl", str(file), f"file://{file}", "linked/*.jsonl"]
    for other in spellings:
        with pytest.raises(UserError, match=r"a\.jsonl is listed twice \(as data/a\.jsonl before\)"):
            rows_of("data/a.jsonl", "b.txt", other)
    (tmp_path / "link.jsonl").symlink_to(file)
    assert texts(rows_of("data/a.jsonl", "link.jsonl")) == ["x", "x"]


@pytest.mark.parametrize("name", ["br[1]", "{a,b}", "col::on", "what?", "all*", "{x}", "a?b=c", "memory:x"])
def test_a_file_that_exists_is_read_whatever_its_name(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("br1", "a", "b", "on", "whats", "all-0"):
        (tmp_path / f"{other}.jsonl").write_text('{"text": "another"}\n')
    file = tmp_path / f"{name}.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"text": "this"}\n'))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for url in (str(file), file.name, f"~/{file.name}", f"{tmp_path}/*.jsonl.gz"):
        (row,) = rows_of(url)
        assert texts([row]) == ["this"], url
        assert row.where == f"{file.name if url == file.name else file}:1"
    (shard,) = list_shards("train", [str(file)], "text")
    file.unlink()
    with pytest.raises(UserError, match="has disappeared since"):
        list(shard.rows())


def test_a_name_that_says_nothing_needs_a_source_type(tmp_path: Path) -> None:
    (tmp_path / "a.dat").write_text("hello")
    with pytest.raises(UserError, match=r"data\.source\.type"):
        list_shards("train", [str(tmp_path / "a.dat")], "text")
    config = DataConfig.model_validate({"train_urls": str(tmp_path / "a.dat"), "source": {"type": "text"}})
    assert texts(list(config.shards("train")[0].rows())) == ["hello"]


def test_globs_and_braces_work_with_a_source_type_too(tmp_path: Path) -> None:
    for name in ("x1", "x2", "y1"):
        (tmp_path / name).write_text(name)
    urls = [str(tmp_path / "x{2,1}"), str(tmp_path / "y*")]
    config = DataConfig.model_validate({"train_urls": urls, "source": {"type": "text"}})
    assert texts(list(config.shards("train")[0].rows())) == ["x2", "x1", "y1"]


@pytest.mark.parametrize(
    "url",
    [
        "nosuch://bucket/a.jsonl",
        "zip://a.txt::missing.zip",
        "reference://x.jsonl",
        "dir://x.jsonl",
        "data:text/plain,a",
    ],
)
def test_a_url_that_cannot_be_opened_is_an_error_for_the_user(url: str) -> None:
    with pytest.raises(UserError, match=r"data\.train_urls"):
        list_shards("train", [url], "text")


def test_a_url_of_another_file_system() -> None:
    import fsspec

    with fsspec.open("memory://corpus/a.jsonl", "w") as file:
        file.write('{"text": "far away"}\n')  # pyright: ignore[reportAttributeAccessIssue]
    assert texts(rows_of("memory://corpus/*.jsonl")) == ["far away"]


def test_the_identity_of_a_shard_changes_with_its_files(tmp_path: Path) -> None:
    def identity() -> dict:
        return list_shards("train", [str(tmp_path / "a.jsonl")], "text")[0].identity()

    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    original = identity()
    assert identity() == original
    (tmp_path / "a.jsonl").write_text('{"text": "longer"}\n')
    assert identity() != original


class TestConfig:
    def test_default_is_the_embedded_corpus(self) -> None:
        assert DataConfig().source_config == Embedded()
        assert DataConfig().shards("train")

    def test_one_url_may_stand_without_a_list(self) -> None:
        assert DataConfig(train_urls="a.jsonl").train_urls == ["a.jsonl"]  # pyright: ignore[reportArgumentType]

    @pytest.mark.parametrize(
        ("section", "message"),
        [
            ({"source": {"type": "embedded"}, "train_urls": ["a.jsonl"]}, "train_urls does not fit; remove one"),
            ({"validation_urls": ["a.jsonl"]}, "validation_urls does not fit; name your own"),
            ({"source": {"type": "jsonl"}}, "needs train_urls"),
            ({"train_urls": []}, r"train_urls is an empty list; name files, or leave the key out \(or null\)"),
            ({"train_urls": [], "validation_urls": ["a.txt"]}, "train_urls is an empty list"),
            ({"configs": {"a": {"train_urls": []}}, "train_weights": {"a": 1}}, "train_urls is an empty list"),
            ({"source": {"type": "xlsx"}}, "does not match any of the expected tags: "),
            ({"source": {"type": "memory", "train": ["a"]}, "train_urls": ["a.txt"]}, "the memory source brings"),
            ({"id": "org/set", "train_urls": ["a.txt"]}, "remove it, or source, train_urls"),
            ({"name": "en", "train_urls": ["a.txt"]}, "name can only be set with id"),
        ],
    )
    def test_contradictions_are_refused(self, section: dict, message: str) -> None:
        with pytest.raises(ValidationError, match=message):
            DataConfig.model_validate(section)

    @pytest.mark.parametrize(
        "section",
        [{"train_urls": None}, {"train_urls": [], "id": "org/set"}, {"train_urls": ["a.txt"], "validation_urls": []}],
    )
    def test_an_empty_list_is_no_contradiction_where_nothing_else_takes_its_place(self, section: dict) -> None:
        config = DataConfig.model_validate(section)
        assert DataConfig.model_validate(config.model_dump()) == config
        assert not config.validation_urls

    def test_every_later_key_is_refused_with_a_reason(self) -> None:
        assert not DataConfig.refused_keys.keys() & DataConfig.model_fields.keys()
        assert {"plaintext", "permutation_type", "enforce_eos"} <= DataConfig.refused_keys.keys()


def test_processes_that_only_tokenise_import_no_jax() -> None:
    import subprocess

    module = "lm_trainer.data.tokenize.process_pool"
    program = f"import sys, {module}; print([m for m in ('jax', 'grain', 'torch') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], env=lmt_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_package_opens_data_only_when_asked() -> None:
    import lm_trainer.data
    from lm_trainer.data import Data, dataset, open_data, pipeline

    assert Data is dataset.Data
    assert open_data is pipeline.open_data
    with pytest.raises(AttributeError, match="no attribute 'close_data'"):
        _ = lm_trainer.data.close_data  # pyright: ignore[reportAttributeAccessIssue]
