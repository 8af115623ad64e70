"""The reference page of Levanter's keys says what the loader does with each of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.generate import fill
from docs.generate.levanter import levanter_key
from lm_trainer.config.loader import load
from lm_trainer.core.errors import ConfigError
from lm_trainer.run.config.run_config import RunConfig
from tests.conftest import ROOT

SECTIONS = yaml.safe_load((ROOT / "docs" / "generate" / "levanter_keys.yaml").read_text(encoding="utf-8"))


def read(directory: Path, section: str, block: dict[str, Any]) -> RunConfig:
    for name in reversed(section.split(".")):
        block = {name: block}
    (directory / "theirs.yaml").write_text(json.dumps(block))
    return load(directory / "theirs.yaml", [], RunConfig).config


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: f"{section['section']} {section.get('type', '')}")
def test_every_entry_is_what_the_loader_does(section: dict[str, Any], tmp_path: Path) -> None:
    section_name, kind = section["section"], section.get("type")
    empty = {"type": kind} if kind else {}
    plain = read(tmp_path, section_name, empty)
    for key, levanter_value in section["keys"].items():
        entry = levanter_key(section_name, kind, key, levanter_value)
        if entry.startswith("refused: "):
            with pytest.raises(ConfigError, match=f"{key}: "):
                read(tmp_path, section_name, {**empty, key: 1})
        else:
            is_same = read(tmp_path, section_name, {**empty, key: levanter_value}) == plain
            assert is_same == (entry == "same" or entry.startswith("read with a note")), (key, entry)


def test_the_page_has_a_row_for_every_key() -> None:
    page = fill((ROOT / "docs" / "reference" / "levanter-keys.md").read_text(encoding="utf-8"))
    assert page.count("\n| `") == sum(len(section["keys"]) for section in SECTIONS) > 100
    assert "| `haps` | `null` | read with a note, as `cycles` |" in page
    assert "| `scan_layers` | `true` | default differs (here: `null`) |" in page
    assert "| `tokenizer` | `null` | refused: the tokenizer belongs to the data; use `data.tokenizer` |" in page
