"""Files in every compression, found by globs, and those that cannot be unpacked."""

from __future__ import annotations

import gzip
import re
import zipfile
from pathlib import Path

import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.data import DataConfig
from tests.data.test_sources import COMPRESS, rows_of, texts, zipped


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
    (tmp_path / "cut.jsonl.zip").write_bytes(zipped(lines)[:-30])
    with pytest.raises(UserError, match=r"cut\.jsonl\.zip is damaged"):
        rows_of(tmp_path / "cut.jsonl.zip")
