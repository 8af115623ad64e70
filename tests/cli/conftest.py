"""An imported model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import run_here
from tests.hf_model import hf_model  # noqa: F401


@pytest.fixture(scope="package")
def checkpoint(hf_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The tiny GPT-2 model, imported by the command."""
    out = tmp_path_factory.mktemp("imported") / "tiny"
    result = run_here("import-hf", hf_model, out)
    assert result.returncode == 0, result.stderr
    assert str(out) in result.stdout
    return out
