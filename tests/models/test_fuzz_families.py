"""Random configurations against transformers: a sample of `python -m benchmarks.fuzz_families`."""

from __future__ import annotations

import pytest

from benchmarks import fuzz_families
from benchmarks.fuzz_configs import FAMILIES
from benchmarks.fuzz_families import Case, compare, report
from lm_trainer.models import MODEL_CONFIGS, WhisperConfig
from lm_trainer.models.hf_table import HfFamily

SAMPLE = ("qwen3", "olmo3", "gemma3", "phi3", "glm4_moe", "deepseek_v3", "deepseek_v2", "qwen3_next", "mamba2", "mpt")
"""Families with most parts."""


def test_every_family_is_drawn() -> None:
    families = {config for config in MODEL_CONFIGS if isinstance(config.hf, HfFamily)} - {WhisperConfig}
    assert {config.model_fields["type"].default for config in families} == FAMILIES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("family", SAMPLE)
def test_logits_cache_and_export_of_a_random_configuration(family: str) -> None:
    pytest.importorskip("transformers")
    outcome = compare(Case(0, list(FAMILIES).index(family)))
    assert (outcome.refused, outcome.defect) == ("", "")


@pytest.mark.slow
def test_a_difference_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(fuzz_families, "TOLERANCE", 0.0)
    outcome = compare(Case(0, list(FAMILIES).index("mpt")))
    assert "logits differ by" in outcome.defect
    assert "| mpt | 0 | 0 | 1 |" in report([outcome])
