"""Values over steps against a loop that counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lm_trainer.config.loader import load
from lm_trainer.core.config import Config
from lm_trainer.core.errors import ConfigError
from lm_trainer.core.piecewise import BatchSchedule, IntSchedule, Piecewise, to_piecewise


def test_each_step_has_the_value_of_its_phase() -> None:
    sizes = Piecewise.from_phases([(0, 32), (3, 64), (10, 16)])
    assert [sizes.at(step) for step in range(12)] == [32] * 3 + [64] * 7 + [16] * 2
    assert sizes.at(10**12) == 16


def test_rows_before_a_step_are_the_sum_of_the_batches() -> None:
    schedule = BatchSchedule(Piecewise.from_phases([(0, 32), (3, 64), (10, 16)]))
    for step in (0, 1, 2, 3, 4, 9, 10, 11, 50):
        assert schedule.rows_before(step) == sum(schedule.at(s) for s in range(step)), step
    assert BatchSchedule.constant(8).rows_before(10**9) == 8 * 10**9


@pytest.mark.parametrize("phases", [[], [(1, 2)], [(0, 1), (0, 2)], [(0, 1), (5, 2), (4, 3)]])
def test_phases_that_do_not_rise_from_zero_are_refused(phases: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="step"):
        Piecewise.from_phases(phases)


class Example(Config):
    size: IntSchedule = 512


@pytest.mark.parametrize(
    ("written", "values"),
    [
        (64, {0: 64, 10**9: 64}),
        ([{"start": 0, "value": 64}], {0: 64, 10**9: 64}),
        ([{"start": 0, "value": 64}, {"start": 1000, "value": 128}], {0: 64, 999: 64, 1000: 128, 5000: 128}),
    ],
)
def test_a_number_or_a_list_of_starts_and_values(written: Any, values: dict[int, int]) -> None:
    example = Example.model_validate({"size": written})
    steps = to_piecewise(example.size)
    assert {step: steps.at(step) for step in values} == values
    assert example.model_dump(mode="json") == {"size": written}
    assert to_piecewise(Example().size).at(3) == 512


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            "size:\n  - {start: 5, value: 64}\n  - start: 3\n    value: 128\n",
            [
                "x.yaml:2:13: size.0.start: the first entry must start at step 0, got 5",
                "x.yaml:3:12: size.1.start: must be later than the entry before, which starts at 5, got 3",
            ],
        ),
        (
            "size:\n  - {start: 0, value: 0}\n  - {start: 3}\n  - {star: 4, value: 1}\n",
            [
                "x.yaml:2:23: size.0.value: expected a number greater than 0, got 0",
                "x.yaml:3:5: size.1.value: required, but missing",
                "x.yaml:4:5: size.2.start: required, but missing",
                "x.yaml:4:6: size.2.star: unknown key; did you mean 'start'?",
            ],
        ),
        ("size: []\n", ["x.yaml:1:7: size: expected a whole number or a list of {start, value}, got an empty list"]),
        ("size: -4\n", ["x.yaml:1:7: size: expected a number greater than 0, got -4"]),
        ("size: {start: 0, value: 4}\n", ["x.yaml:1:7: size: expected a whole number or a list, got a block of keys"]),
    ],
)
def test_mistakes_are_found_at_their_line(in_tmp_path: Path, text: str, problems: list[str]) -> None:
    Path("x.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(Path("x.yaml"), [], Example)
    assert sorted(caught.value.problems) == sorted(problems)
