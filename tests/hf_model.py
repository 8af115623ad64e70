"""A checkpoint of Hugging Face with a tokenizer, for the directories whose tests need one.

It is not among the fixtures of all tests: these would all depend on the data, of which the tokenizer is a part.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lm_trainer.data.tokenizer.bytes import ByteTokenizer


@pytest.fixture(scope="session")
def hf_model(tiny_gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny GPT-2 checkpoint with a tokenizer."""
    out = tmp_path_factory.mktemp("hf") / "tiny"
    out.mkdir()
    for name in ("config.json", "model.safetensors"):
        (out / name).write_bytes((tiny_gpt2 / name).read_bytes())
    ByteTokenizer().save(out)
    return out
