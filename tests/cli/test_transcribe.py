"""`lmt transcribe`: mistakes that are found before the model is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.wav"], "gone.wav: there is no such file"),
        (["a.wav", "b/a.wav", "--out", "texts"], "two recordings have one name"),
        (["a.wav", "--out", "a.wav/texts"], "--out a.wav/texts: cannot be made (Not a directory)"),
    ],
)
def test_mistakes(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b").mkdir()
    for name in ("a.wav", "b/a.wav"):
        (tmp_path / name).write_bytes(b"")
    done = CliRunner().invoke(app, ["transcribe", "no-model", *arguments])
    assert done.exit_code == 2
    assert message in done.stderr
