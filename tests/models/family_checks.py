"""Checks of each family, read from the parameters of the tests, for the table of `docs/generate/family_checks.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import pytest

from lm_trainer.models import MODEL_CONFIGS, DecoderConfig
from tests.models import test_every_family, test_hf, test_hf_families, test_whisper
from tests.run import test_families, test_speech

Selection = Literal["quick", "slow", "exhaustive"]
"""Tests that include a check, those that run most often first."""
SELECTIONS: tuple[Selection, ...] = ("quick", "slow", "exhaustive")

Test = Callable[..., None]


class OfFamily(NamedTuple):
    """A test of one family, all of whose cases are about it."""

    family: str
    test: Test


CHECKS: Mapping[str, Sequence[Test | OfFamily]] = {
    "logits": (
        test_hf_families.test_logits_of_every_setting,
        OfFamily("gpt2", test_hf.test_logits_and_round_trip),
        OfFamily("whisper", test_whisper.test_logits_are_those_of_transformers),
    ),
    "export": (
        test_hf_families.test_import_and_export_lose_nothing,
        OfFamily("gpt2", test_hf.test_transformers_loads_what_is_written),
        OfFamily("whisper", test_whisper.test_tensors_and_config_come_back_exactly),
    ),
    "causality": (test_every_family.test_causal_and_inside_segments,),
    "packing": (test_every_family.test_packed_equals_unpacked,),
    "cache": (
        test_every_family.test_decoding_with_a_cache_equals_the_full_forward_pass,
        OfFamily("whisper", test_whisper.test_decoding_with_a_cache_equals_the_full_forward_pass),
    ),
    "devices": (
        test_families.test_one_device_and_several,
        OfFamily("whisper", test_speech.test_bits_do_not_depend_on_devices),
    ),
    "stages": (
        test_families.test_layer_by_layer,
        OfFamily("whisper", test_speech.test_bits_do_not_depend_on_devices),
    ),
    "parameters": (
        test_every_family.test_parameter_count,
        OfFamily("whisper", test_whisper.test_parameters_are_as_many_as_in_transformers),
    ),
    "FLOPs": (
        test_every_family.test_flops_are_those_of_the_program,
        OfFamily("whisper", test_whisper.test_flops_are_those_of_the_program),
    ),
}
"""Check -> the tests that make it, with the families as their cases."""

_TYPES = {config.model_fields["type"].default for config in MODEL_CONFIGS}
_TYPES_BY_HF = {config.hf.model_type: config.model_fields["type"].default for config in MODEL_CONFIGS}


def list_family_checks() -> dict[str, dict[str, Selection]]:
    """Returns, for each family, its checks and the most frequent selection of tests that includes each."""
    checks_by_family: dict[str, dict[str, Selection]] = {
        config.model_fields["type"].default: {} for config in MODEL_CONFIGS
    }
    for check, tests in CHECKS.items():
        for test in tests:
            for family, selection in _list_cases(test):
                of_family = checks_by_family[family]
                selections = {of_family.get(check, selection), selection}
                of_family[check] = next(one for one in SELECTIONS if one in selections)
    return checks_by_family


def _list_cases(test: Test | OfFamily) -> Iterator[tuple[str, Selection]]:
    """Yields the family of each case of a test, and the selection of tests that includes the case."""
    function = test.test if isinstance(test, OfFamily) else test
    marks: list[pytest.Mark] = getattr(function, "pytestmark", [])
    values = [value for mark in marks if mark.name == "parametrize" for value in mark.args[1]]
    if isinstance(test, OfFamily):
        values = values or [None]
    for value in values:
        family = test.family if isinstance(test, OfFamily) else _find_family(_list_arguments(value))
        yield family, _find_selection([*marks, *getattr(value, "marks", ())])


def _list_arguments(value: Any) -> Sequence[Any]:
    """Returns the arguments of a case, which is the result of `pytest.param`, a tuple or a single argument."""
    if hasattr(value, "marks"):
        return value.values
    return value if isinstance(value, tuple) else (value,)


def _find_family(values: Sequence[Any]) -> str:
    """Returns the family of a case: its configuration, its name, or its name in transformers is one of the values."""
    for value in values:
        if isinstance(value, DecoderConfig):
            return value.type
        if isinstance(value, str):
            return value if value in _TYPES else _TYPES_BY_HF[value]
    raise ValueError(f"no family in {values}")


def _find_selection(marks: Sequence[Any]) -> Selection:
    names = {getattr(mark, "name", None) for mark in marks}
    for selection in reversed(SELECTIONS):
        if selection in names:
            return selection
    return "quick"
