"""Files that a crash leaves whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lm_trainer.core.files import append_line, write_atomically


def test_a_line_that_was_cut_off_does_not_spoil_the_next(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    append_line(file, b'{"a": 1}')
    with file.open("ab") as stream:
        stream.write(b'{"b": ')
    append_line(file, b'{"c": 3}')
    assert file.read_bytes() == b'{"a": 1}\n{"b": \n{"c": 3}\n'


@pytest.mark.parametrize("content", ["text ü", b"\x00bytes"], ids=["text", "bytes"])
def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, content: str | bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    write_atomically(file, content)
    before = file.read_bytes()
    assert before == (content.encode() if isinstance(content, str) else content)

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(file, content * 2)
    assert file.read_bytes() == before
    assert [*tmp_path.iterdir()] == [file]
