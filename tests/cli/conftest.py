"""A tiny model in both layouts, and what a refusal looks like."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from tests.conftest import lmt_command, lmt_environment


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
    result = subprocess.run(
        lmt_command("import-hf", hf_model, out),
        env=lmt_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert str(out) in result.stdout
    return out


def refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2, an explanation, and no traceback."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr
