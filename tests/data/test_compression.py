"""Files in every compression, found by globs, and those that cannot be unpacked."""

from __future__ import annotations

import gzip
import re
import zipfile
from pathlib import Path

import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.data import DataConfig
from lm_trainer.data.sources import Row
from tests.data.test_sources import COMPRESS, rows_of, texts, zip_bytes, zstd


def test_a_glob_finds_files_in_every_compression(tmp_path: Path) -> None:
    for ending, compress in COMPRESS.items():
        (tmp_path / f"a{ending[1:]}.txt{ending.upper()}").write_bytes(compress(ending.encode()))
    (tmp_path / "b.txt").write_text("plain")
    assert texts(rows_of(tmp_path / "*")) == [*sorted(COMPRESS), "plain"]


@pytest.mark.parametrize("source", [{}, {"type": "jsonl"}, {"type": "text"}, {"type": "parquet"}])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a.jsonl.lz4", "is packed as .lz4, which is not read; unpack it, or pack it in one of these: .gz, .gzip"),
        ("a.tar.gz", "is packed as .tar, which is not read"),
        ("a.jsonl.gz.zst", "is packed twice (.gz.zst); unpack it once"),
    ],
)
def test_other_compressions_are_refused(tmp_path: Path, source: dict[str, str], name: str, reason: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b'{"text": "x"}'))
    config = DataConfig.model_validate({"train_urls": f"{tmp_path}/*", **({"source": source} if source else {})})
    with pytest.raises(UserError, match=rf"data\.train_urls: {tmp_path}/{re.escape(f'{name} {reason}')}"):
        config.shards("train")


def test_archives_of_several_files_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    lines = b'{"text": "x"}\n' * 1000
    with zipfile.ZipFile(tmp_path / "two.jsonl.zip", "w") as archive:
        archive.writestr("a.jsonl", lines)
        archive.writestr("b.jsonl", lines)
    with pytest.raises(UserError, match=r"two\.jsonl\.zip holds 2 files, and only an archive of one is read"):
        rows_of(tmp_path / "two.jsonl.zip")
    # Deflate64, as Windows packs large files.
    other = bytearray(zip_bytes(lines))
    for offset in (8, other.index(b"PK\x01\x02") + 10):
        other[offset] = 9
    (tmp_path / "other.jsonl.zip").write_bytes(other)
    with pytest.raises(UserError, match=r"other\.jsonl\.zip is packed in a way that is not read .*; unpack it"):
        rows_of(tmp_path / "other.jsonl.zip")
    (tmp_path / "cut.jsonl.zip").write_bytes(zip_bytes(lines)[:-30])
    with pytest.raises(UserError, match=r"cut\.jsonl\.zip is damaged"):
        rows_of(tmp_path / "cut.jsonl.zip")


LINES = [b'{"text": "%d %d"}\n' % (i, i * i) for i in range(2000)]
TEXTS = [f"{i} {i * i}" for i in range(2000)]


@pytest.mark.parametrize("log", [27, 28, 31])
def test_long_windows_of_zstd_are_read(tmp_path: Path, log: int) -> None:
    zstandard = pytest.importorskip("zstandard")
    # Without the size of the content, as of a stream, the frame has the window that was asked for.
    parameters = zstandard.ZstdCompressionParameters(window_log=log, hash_log=12, chain_log=12, enable_ldm=False)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = b"".join([*(compressor.compress(line) for line in LINES), compressor.flush()])
    assert zstandard.get_frame_parameters(packed).window_size == 1 << log
    (tmp_path / "a.jsonl.zst").write_bytes(packed)
    assert texts(rows_of(tmp_path / "a.jsonl.zst")) == TEXTS


def test_what_zstd_says_is_not_turned_into_another_claim(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    content = b"".join(LINES)
    dictionary = zstandard.train_dictionary(2000, LINES)
    flipped = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(content))
    flipped[-6] ^= 1
    for name, packed, reason in (
        ("dictionary", zstandard.ZstdCompressor(dict_data=dictionary).compress(content), "packed with a dictionary"),
        ("flipped", bytes(flipped), "is damaged: zstd"),
        ("none", content, "is damaged: zstd"),
        ("cut", zstd(content)[:-50], "is damaged: truncated"),
        ("tail", zstd(content) + b"garbage", "is damaged: something else follows its end"),
    ):
        (tmp_path / f"{name}.jsonl.zst").write_bytes(packed)
        with pytest.raises(UserError, match=rf"{name}\.jsonl\.zst.*{reason}"):
            rows_of(tmp_path / f"{name}.jsonl.zst")


@pytest.mark.parametrize("ending", [".xz", ".bz2", ".lzma"])
@pytest.mark.parametrize("padding", [0, 4, 512, 3 << 20])
def test_frames_after_padding_are_read(tmp_path: Path, ending: str, padding: int) -> None:
    half = len(LINES) // 2
    pack = COMPRESS[ending]
    packed = pack(b"".join(LINES[:half])) + bytes(padding) + pack(b"".join(LINES[half:])) + bytes(padding)
    (tmp_path / f"a.jsonl{ending}").write_bytes(packed)
    assert texts(rows_of(tmp_path / f"a.jsonl{ending}")) == TEXTS


@pytest.mark.parametrize("ending", [".xz", ".bz2"])
def test_a_frame_that_cannot_be_read_is_not_taken_for_the_end(tmp_path: Path, ending: str) -> None:
    pack, path = COMPRESS[ending], tmp_path / f"a.jsonl{ending}"
    first, second = pack(b"".join(LINES[:1000])), bytearray(pack(b"".join(LINES[1000:])))
    second[0] ^= 1
    path.write_bytes(first + second)
    with pytest.raises(UserError, match="is damaged: something else follows its end"):
        rows_of(path)
    second[0] ^= 1
    second[len(second) // 2] ^= 1
    path.write_bytes(first + second)
    with pytest.raises(UserError, match=r"a\.jsonl\.\w+ is damaged"):
        rows_of(path)
    path.write_bytes(first + second[: len(second) // 2])
    with pytest.raises(UserError, match=r"a\.jsonl\.\w+ is damaged"):
        rows_of(path)


@pytest.mark.parametrize("prefix", ["\n", "\r\n  \n", "\ufeff\n\n"])
def test_an_array_of_json_after_blank_lines_is_read(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "a.json").write_text(f'{prefix}  [{{"text": "x"}},\n {{"text": "y"}}]\n\n', newline="")
    assert texts(rows_of(tmp_path / "a.json")) == ["x", "y"]
    # Lines keep their numbers.
    (tmp_path / "b.json").write_text('\n\n{"text": "x"}\n\n{"text": "y"}\n')
    rows = rows_of(tmp_path / "b.json")
    assert [(row.number, row.where.rpartition(":")[2]) for row in rows] == [(i, str(i + 1)) for i in range(5)]
    assert texts(rows) == ["", "", "x", "", "y"]
    for content in ("", "\n\n"):
        (tmp_path / "c.json").write_text(content)
        assert [row.text for row in rows_of(tmp_path / "c.json") if isinstance(row, Row)] == [""] * len(content)
