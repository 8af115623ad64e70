from __future__ import annotations

import re
from pathlib import Path

import lm_trainer.models
import lm_trainer.nn


def families() -> set[str]:
    """Words of the names of families: `gpt` and `neox` of `gpt_neox`."""
    names = [config.model_fields["type"].default for config in lm_trainer.models.MODEL_CONFIGS]
    # A kind of layer, the start of random numbers, and words of everyday language, which parts may name.
    return {word for name in names for word in re.findall("[a-z]+", name)} - {"moe", "seed", "next", "v"}


def test_parts_name_no_family():
    assert {"gpt", "neox", "llama"} < families()
    words = re.compile(r"(?<![a-z])(" + "|".join(families()) + ")", re.IGNORECASE)
    families_named = [
        f"{path.name}: {match[0]}"
        for path in Path(lm_trainer.nn.__path__[0]).glob("*.py")
        for match in words.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not families_named
