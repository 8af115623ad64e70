from __future__ import annotations

import re
from pathlib import Path

import lm_trainer.models
import lm_trainer.nn

FAMILIES = ("gpt", "llama", "mistral", "mixtral", "qwen", "gemma", "olmo", "phi", "neox", "mpt", "backpack", "whisper")


def test_parts_name_no_family():
    words = re.compile(r"(?<![a-z])(" + "|".join(FAMILIES) + ")", re.IGNORECASE)
    found = [
        f"{path.name}: {match[0]}"
        for path in Path(lm_trainer.nn.__path__[0]).glob("*.py")
        for match in words.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found
    for config in lm_trainer.models.MODEL_CONFIGS:
        assert config.model_fields["type"].default.startswith(FAMILIES)
