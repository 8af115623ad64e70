"""Values over steps against a loop that counts."""

from __future__ import annotations

import pytest

from lm_trainer.core.steps import BatchSchedule, Steps


def test_each_step_has_the_value_of_its_phase() -> None:
    sizes = Steps.make([(0, 32), (3, 64), (10, 16)])
    assert [sizes.at(step) for step in range(12)] == [32] * 3 + [64] * 7 + [16] * 2
    assert sizes.at(10**12) == 16


def test_rows_before_a_step_are_the_sum_of_the_batches() -> None:
    schedule = BatchSchedule(Steps.make([(0, 32), (3, 64), (10, 16)]))
    for step in (0, 1, 2, 3, 4, 9, 10, 11, 50):
        assert schedule.rows_before(step) == sum(schedule.at(s) for s in range(step)), step
    assert BatchSchedule.constant(8).rows_before(10**9) == 8 * 10**9


@pytest.mark.parametrize("phases", [[], [(1, 2)], [(0, 1), (0, 2)], [(0, 1), (5, 2), (4, 3)]])
def test_phases_that_do_not_rise_from_zero_are_refused(phases: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="step"):
        Steps.make(phases)
