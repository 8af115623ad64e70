"""An output directory is complete or does not exist."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.export.output import atomic_directory
from tests.conftest import ROOT

PATTERNS = ("config.json", "model-*.safetensors")


def write(out: Path, content: str = "new", *, overwrite: bool = False) -> None:
    with atomic_directory(out, overwrite=overwrite, replaceable=PATTERNS) as draft:
        assert list(draft.iterdir()) == []
        (draft / "config.json").write_text(content)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_new_directory_and_its_parents_appear(tmp_path: Path) -> None:
    write(tmp_path / "a" / "out")
    assert (tmp_path / "a" / "out" / "config.json").read_text() == "new"
    assert names(tmp_path / "a") == ["out"]


def test_a_relative_path_and_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    write(Path("out"))
    assert names(tmp_path / "out") == ["config.json"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, UserError])
def test_a_failure_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with atomic_directory(tmp_path / "out", overwrite=False, replaceable=PATTERNS) as draft:
            (draft / "config.json").write_text("half")
            raise error("in the middle")

    with pytest.raises(error):
        fail()
    assert names(tmp_path) == []


def test_a_full_disk_is_the_machine_s_fault(tmp_path: Path) -> None:
    def fill() -> None:
        with atomic_directory(tmp_path / "out", overwrite=False, replaceable=PATTERNS):
            Path("/dev/full").write_text("x")

    with pytest.raises(MachineError, match="No space left"):
        fill()
    assert names(tmp_path) == []


def test_what_is_there_is_kept_unless_overwrite_is_said(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    with pytest.raises(UserError, match="--overwrite"):
        write(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == "old"
    write(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "config.json").read_text() == "new"
    assert names(tmp_path) == ["out"]


def test_overwrite_never_deletes_what_is_no_model(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out)
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        write(out, overwrite=True)
    assert (out / "thesis.tex").read_text() == "years of work"


def test_a_failure_while_overwriting_keeps_the_old_model(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")

    def fail() -> None:
        with atomic_directory(tmp_path / "out", overwrite=True, replaceable=PATTERNS):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert (tmp_path / "out" / "config.json").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match="not a directory"):
        write(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out").read_text() == "a file"


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be written"):
        write(tmp_path / "file" / "out")


WRITER = """
import sys, time
from pathlib import Path
from lm_trainer.export.output import atomic_directory
with atomic_directory(Path(sys.argv[1]), overwrite=False, replaceable=()) as draft:
    (draft / "config.json").write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


def test_two_writers_and_a_killed_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", WRITER, str(out)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "writing\n"
        with pytest.raises(UserError, match="another process"):
            write(out)
        process.send_signal(signal.SIGKILL)
    assert not out.exists()
    write(out)
    assert names(tmp_path) == ["out"]
    assert (out / "config.json").read_text() == "new"


def test_a_second_writer_is_refused_and_disturbs_nothing(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "out", overwrite=False, replaceable=PATTERNS) as draft:
        (draft / "config.json").write_text("first")
        with pytest.raises(UserError, match="out: is being written by another process; wait for it to end"):
            write(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == "first"
