"""The table of the checks of each family is true and complete."""

from __future__ import annotations

import pytest

from docs.generate.family_checks import family_checks
from lm_trainer.models import MODEL_CONFIGS
from tests.models.family_checks import CHECKS, OfFamily, list_family_checks

WITHOUT = {
    # transformers does not know it.
    "backpack": {"logits", "export"},
    # Its rows are of one recording each.
    "whisper": {"causality", "packing"},
}
"""Checks that make no sense for a family."""


@pytest.mark.parametrize("family", [config.model_fields["type"].default for config in MODEL_CONFIGS])
def test_every_family_has_every_check(family: str) -> None:
    assert list_family_checks()[family].keys() == CHECKS.keys() - WITHOUT.get(family, set())


def test_cases_are_found_with_the_tests_that_include_them(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_or_slow = [pytest.param("llama", 1, marks=pytest.mark.slow), ("mixtral", 2), ("granitemoehybrid", 3)]

    @pytest.mark.parametrize(("name", "number"), quick_or_slow)
    def of_some(name: str, number: int) -> None: ...

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("name", ["llama", "gpt2"])
    def of_two(name: str) -> None: ...

    @pytest.mark.slow
    def of_one() -> None: ...

    checks_of_tests = {"some": [of_some, of_two, OfFamily("whisper", of_one)]}
    monkeypatch.setattr("tests.models.family_checks.CHECKS", checks_of_tests)
    checks = {family: of_family for family, of_family in list_family_checks().items() if of_family}
    assert checks == {
        "llama": {"some": "slow"},
        "mixtral": {"some": "quick"},
        "granite4": {"some": "quick"},
        "gpt2": {"some": "exhaustive"},
        "whisper": {"some": "slow"},
    }


def test_the_table_has_all_of_it() -> None:
    rows = [row.strip("| ").split(" | ") for row in family_checks().splitlines()]
    assert rows[0] == ["family", *CHECKS, "file, lines"]
    table = {cells[0].strip("`"): cells[1:] for cells in rows[2:]}
    for family, checks in list_family_checks().items():
        assert table[family][:-1] == [checks.get(check, "no") for check in CHECKS]
    assert table["deepseek_v2"][-1] == table["deepseek_v3"][-1]
    assert table["deepseek_v2"][-1].startswith("`deepseek.py`, ")
