"""A tiny model in both formats, and the form of a refusal."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from lm_trainer.data.tokenizer.bytes import ByteTokenizer


@pytest.fixture(scope="package")
def hf_model(tiny_gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers checkpoint with a tokenizer."""
    out = tmp_path_factory.mktemp("hf") / "tiny"
    out.mkdir()
    for name in ("config.json", "model.safetensors"):
        (out / name).write_bytes((tiny_gpt2 / name).read_bytes())
    ByteTokenizer().save(out)
    return out


@pytest.fixture(scope="package")
def checkpoint(hf_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, imported by the command."""
    out = tmp_path_factory.mktemp("imported") / "tiny"
    result = run_here("import-hf", hf_model, out)
    assert result.returncode == 0, result.stderr
    assert str(out) in result.stdout
    return out


class Outcome(NamedTuple):
    """The outcome of a command, with the fields of a finished process."""

    returncode: int
    stdout: str
    stderr: str


Lmt = Callable[..., Outcome]


def run_here(*args: str | Path) -> Outcome:
    from cli.main import app

    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
def lmt(in_tmp_path: Path) -> Lmt:
    """`lmt("export-hf", ...)`: runs a command in this process, in an empty directory; a crash is raised.

    What depends on the environment, on signals or on a fresh process needs `run_lmt` instead.
    """
    return run_here


def refused(result: Outcome | subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2, an explanation, and no traceback."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr
