"""Files that a crash leaves whole."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lm_trainer.core.errors import translate_disk_error
from lm_trainer.core.files import append_line, ensure_writable_directory, write_atomically


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
    original = file.read_bytes()
    assert original == (content.encode() if isinstance(content, str) else content)

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(file, content * 2)
    assert file.read_bytes() == original
    assert [*tmp_path.iterdir()] == [file]


def _read_by_handle(file: Path) -> bytes:
    with file.open("rb", buffering=0) as stream:
        return stream.read(1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads a file that cannot be read at its beginning")
@pytest.mark.parametrize("read", [Path.read_bytes, Path.read_text, _read_by_handle])
def test_an_error_of_reading_names_the_file(read: Callable[[Path], object]) -> None:
    with pytest.raises(OSError, match="Input/output error") as caught:
        read(Path("/proc/self/mem"))
    assert caught.value.filename is None, "the system does not name it"
    assert str(translate_disk_error(caught.value)).startswith("/proc/self/mem: Input/output error; ")


def test_a_probe_that_was_killed_goes_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(self: Path, **_: bool) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            ensure_writable_directory(tmp_path, "a.setting")
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in the next process
    ensure_writable_directory(tmp_path, "a.setting")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.EMFILE, "ulimit -n"), (errno.EACCES, "mend the permissions"), (errno.ENOSPC, "room")]
)
def test_an_error_of_the_machine_has_a_remedy(code: int, remedy: str) -> None:
    assert remedy in str(translate_disk_error(OSError(code, os.strerror(code), "a/file")))
