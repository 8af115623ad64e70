"""Schedules against optax where it has the same one, a program that walks through the phases, and points by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import optax
import pytest
from pydantic import ValidationError

from lm_trainer.core.errors import UserError
from lm_trainer.core.piecewise import BatchSchedule, Piecewise, TokenSchedule
from lm_trainer.optim import AdamConfig
from lm_trainer.optim.schedule import Schedule, ScheduleName

TOKENS = TokenSchedule(BatchSchedule(Piecewise.from_phases([(0, 32), (40, 64)])), seq_len=128)
TOTAL = 100


def schedule(name: ScheduleName = "cosine", total: int = TOTAL, **fields: Any) -> Schedule:
    """A schedule with a peak of 2, and without a warm-up unless one is given."""
    settings = {"learning_rate": 2.0, "warmup": 0, **fields}
    return AdamConfig(lr_schedule=name, **settings).schedule(total, TOKENS)


def test_cosine_with_warmup_equals_optax() -> None:
    learning_rate = schedule(warmup=10)
    reference = optax.warmup_cosine_decay_schedule(0.0, 2.0, warmup_steps=10, decay_steps=100, end_value=0.2)
    for step in range(130):
        assert learning_rate(step) == pytest.approx(float(np.asarray(reference(step))), rel=1e-5, abs=1e-7), step


def test_warmup_stable_decay_equals_optax() -> None:
    learning_rate = schedule("linear", warmup=0.1, decay=0.2)
    reference = optax.join_schedules(
        [optax.linear_schedule(0, 2.0, 10), optax.constant_schedule(2.0), optax.linear_schedule(2.0, 0.2, 20)],
        [10, 80],
    )
    for step in range(120):
        assert learning_rate(step) == pytest.approx(float(np.asarray(reference(step))), rel=1e-5), step


def test_cycles_equal_optax() -> None:
    learning_rate = schedule(warmup=5, rewarmup=4, decay=10, cycles=[30, 70])
    pieces, boundaries = [], []
    for start, end in ((0, 30), (30, 70), (70, 100)):
        warmup = 4 if start else 5
        pieces += [
            optax.linear_schedule(0.2 if start else 0.0, 2.0, warmup),
            optax.constant_schedule(2.0),
            optax.cosine_decay_schedule(2.0, 10, alpha=0.1),
        ]
        boundaries += [start + warmup, end - 10, end]
    reference = optax.join_schedules(pieces, boundaries[:-1])
    for step in range(120):
        assert learning_rate(step) == pytest.approx(float(np.asarray(reference(step))), rel=1e-5, abs=1e-7), step


def decayed(name: str, since: int, length: int, tokens: int, *, rows: int, warmup: int) -> float:
    """The decay from 2 to 0.1, put in other words than those of the code."""
    match name:
        case "linear":
            return 2 * (1 - since / length) + 0.1 * since / length
        case "cosine":
            return 0.1 + 1.9 * math.cos(math.pi * since / length / 2) ** 2
        case "inv":
            return 1 / ((1 - since / length) / 2 + since / length / 0.1)
        case "inv_sqrt":
            return max(0.1, 2 / math.sqrt(1 + since / max(1, warmup)))
        case "power":
            return min(2.0, max(0.1, rows * 4.6 / tokens**0.51)) if tokens else 2.0
    return 2.0


def walk(name: str, ends: list[int], warmup: int, rewarmup: int, decay: int | None) -> Iterator[float]:
    """The learning rate step by step for a peak of 2, phase after phase."""
    low, start = 0.0, 0
    for end in ends:
        up = rewarmup if start else warmup
        down = end - start - up if decay is None else decay
        rows = [32 if step < 40 else 64 for step in range(start, end + 1)]
        tokens = list(itertools.accumulate((128 * r for r in rows), initial=0))
        since_start = range(end - down - start, end - start + 1)
        values = [
            decayed(name, index, down, tokens[step_index], rows=rows[step_index], warmup=warmup)
            for index, step_index in enumerate(since_start)
        ]
        yield from (low + (values[0] - low) * index / up for index in range(up))
        yield from [values[0]] * (end - start - up - down)
        yield from values[:-1]
        low, start = values[-1], end
    yield from [low] * 20


SHAPES = ["constant", "linear", "cosine", "inv_sqrt", "inv", "power"]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("ends", "warmup", "rewarmup", "decay"),
    [
        ([100], 0, 0, None),
        ([100], 7, 0, 60),
        ([25, 50, 75, 100], 5, 0, None),
        ([20, 31, 100], 6, 3, 7),
        ([50, 62, 100], 10, 5, 7),
    ],
)
def test_every_step_equals_a_walk_through_the_phases(
    name: ScheduleName, ends: list[int], warmup: int, rewarmup: int, decay: int | None
) -> None:
    cycled = {"cycles": ends, "rewarmup": rewarmup} if len(ends) > 1 else {}
    learning_rate = schedule(name, warmup=warmup, decay=decay, min_lr_ratio=0.05, **cycled)
    expected = list(walk(name, ends, warmup, rewarmup, decay))
    assert [learning_rate(step) for step in range(120)] == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_points_by_hand() -> None:
    assert schedule("constant", warmup=4)(2) == 1.0
    assert schedule("constant", warmup=4)(90) == 2.0
    assert schedule("inv")(50) == pytest.approx(2 / (1 + 9 * 0.5))
    assert schedule("inv")(100) == pytest.approx(0.2)
    assert schedule("inv_sqrt", warmup=10, min_lr_ratio=0.0)(50) == pytest.approx(2 * math.sqrt(10 / 50))
    assert schedule("inv_sqrt", warmup=1, min_lr_ratio=0.5)(90) == pytest.approx(1.0)
    # Without a decay the peak is held; a warm-up of a whole cycle leaves no room for one.
    assert schedule(decay=0)(100) == 2.0
    assert [schedule(warmup=1.0)(step) for step in (50, 100, 200)] == [1.0, 2.0, 2.0]


@pytest.mark.parametrize("name", ["linear", "cosine", "inv"])
def test_every_decay_begins_at_the_peak_and_ends_at_the_minimum(name: ScheduleName) -> None:
    rate = schedule(name, warmup=10)
    assert rate(0) == 0.0
    assert rate(10) == pytest.approx(2.0)
    assert rate(100) == pytest.approx(0.2)
    assert rate(10**6) == pytest.approx(0.2)
    assert all(rate(step) >= rate(step + 1) for step in range(10, 120))


def test_power_counts_more_tokens_than_32_bits_hold() -> None:
    tokens = TokenSchedule(BatchSchedule.constant(1024), seq_len=4096)
    rate = AdamConfig(lr_schedule="power", learning_rate=0.02, min_lr_ratio=0.0).schedule(10**7, tokens)
    for step in (200_000, 10**6, 10**7):
        assert rate(step) == pytest.approx(1024 * 4.6 * (step * 1024 * 4096.0) ** -0.51)
    assert rate(100_000) > rate(200_000) > 0
    assert AdamConfig(lr_schedule="power", learning_rate=0.02).schedule(10**7, tokens)(10**7) == 0.002
    with pytest.raises(ValueError, match="number of tokens in each step"):
        AdamConfig(lr_schedule="power").schedule(100)


def jumps(**fields: Any) -> list[int]:
    """The steps at which the learning rate is back at its peak."""
    rate = schedule("linear", **fields)
    return [step for step in range(1, TOTAL) if rate(step) == 2.0 and rate(step - 1) < 2.0]


@pytest.mark.parametrize(
    ("fields", "starts"),
    [
        ({"cycles": 1}, []),
        ({"cycles": 4}, [25, 50, 75]),
        ({"cycles": 3}, [33, 66]),
        ({"cycles": [10, 40]}, [10, 40]),
        ({"cycles": [10, 40, 100]}, [10, 40]),
        ({"cycle_length": 20}, [20, 40, 60, 80]),
        ({"cycle_length": 30}, [30, 60, 90]),
        ({"cycle_length": 60}, [60]),
        ({"cycle_length": 100}, []),
        ({"cycle_length": 0.25}, [25, 50, 75]),
        ({"cycle_length": 0.3}, [30, 60, 90]),
        ({"cycle_length": 0.333}, [33, 66]),
        ({"cycle_length": 1.0}, []),
        ({"cycle_length": [10, 20, 70]}, [10, 30]),
        ({"cycle_length": [10, 20]}, [10, 30]),
    ],
)
def test_where_cycles_begin(fields: dict[str, Any], starts: list[int]) -> None:
    assert jumps(**fields) == starts


def test_fractions_are_of_their_cycle_and_whole_numbers_are_steps() -> None:
    rate = schedule("linear", cycles=[20, 100], warmup=0.1, rewarmup=0.05, decay=0.25)
    assert [c._asdict() for c in rate.cycles] == [
        {"start": 0, "warmup": 2, "stable": 13, "decay": 5},
        {"start": 20, "warmup": 4, "stable": 56, "decay": 20},
    ]
    one = schedule("linear", cycles=2, warmup=1, rewarmup=1, decay=1).cycles
    assert [(c.warmup, c.stable, c.decay) for c in one] == [(1, 48, 1)] * 2
    assert schedule("linear", warmup=1.0).cycles[0].warmup == 100


@pytest.mark.parametrize(
    "fields",
    [
        {"learning_rate": 3.0},
        {"min_lr_ratio": 0.2},
        {"warmup": 3},
        {"rewarmup": 6},
        {"decay": 13},
        {"cycles": 5},
        {"cycles": None, "cycle_length": 40},
        *({"lr_schedule": name} for name in SHAPES if name != "cosine"),
        {"cycle_peaks": [1.0, 0.5]},
        {"decay": [10, 20]},
    ],
)
def test_every_field_changes_the_learning_rate(fields: dict[str, Any]) -> None:
    base = {"learning_rate": 2.0, "warmup": 10, "rewarmup": 5, "decay": 10, "cycles": 2, "lr_schedule": "cosine"}
    before, after = (AdamConfig(**kw).schedule(TOTAL, TOKENS) for kw in (base, {**base, **fields}))
    assert [before(step) for step in range(TOTAL)] != [after(step) for step in range(TOTAL)]


def test_cycles_with_peaks_and_decays_of_their_own() -> None:
    config = AdamConfig(
        learning_rate=2.0,
        warmup=4,
        decay=(2, 5),
        cycles=(10, 30),
        cycle_peaks=(1.5, 0.5),
        lr_schedule="linear",
        min_lr_ratio=0,
    )
    learning_rate = config.schedule(30)
    first = [3 * step / 4 for step in range(4)] + [3.0] * 5 + [1.5]
    second = [1.0] * 16 + [0.8, 0.6, 0.4, 0.2]
    assert [learning_rate(step) for step in range(31)] == pytest.approx([*first, *second, 0.0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"warmup": 0.6, "decay": 50}, r"^warmup \(60 steps\) and decay \(50 steps\) do not fit into 100 training"),
        ({"warmup": 120}, r"^warmup \(120 steps\) does not fit into 100 training steps"),
        (
            {"cycles": [40, 60, 100], "rewarmup": 15, "decay": 0.5},
            r"^rewarmup \(15 steps\) and decay \(10 steps\) do not fit into cycle 2, steps 40 to 60; shorten them",
        ),
        ({"cycle_length": 30, "decay": 25}, r"decay \(25 steps\) do not fit into cycle 4, steps 90 to 100"),
        ({"cycles": [50, 120]}, r"cycles: \[50, 120\] ends at step 120, but the run has 100 steps"),
        ({"cycles": [50, 20]}, r"cycles: \[50, 20\]: cycle 2 would go from step 50 to 20"),
        ({"cycles": 80}, r"cycles: 80: cycle 1 would go from step 0 to 1; .* at least 2 steps"),
        ({"cycle_length": 1}, r"cycle_length: 1: cycle 1 would go from step 0 to 1; .* 1.0 is the whole run"),
        ({"cycle_length": 33}, r"cycle_length: 33: cycle 4 would go from step 99 to 100"),
        ({"cycle_length": 200}, r"cycle_length: 200 is longer than the run, which has 100 steps"),
        ({"cycle_length": 0.0013}, r"cycle_length: 0.0013 is less than a step"),
        ({"cycle_length": [60, 60]}, r"cycle_length: \[60, 60\] ends at step 120, but the run has 100 steps"),
        ({"lr_schedule": "inv", "min_lr_ratio": 0.0}, "set min_lr_ratio above 0"),
        ({"cycles": 2, "decay": [10]}, r"decay: \[10\] lists 1 decays for 2 cycles"),
        ({"cycles": 2, "cycle_peaks": [1, 1, 1]}, "cycle_peaks lists 3 peaks for 2 cycles"),
    ],
)
def test_schedules_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamConfig(**{"warmup": 0, **fields}).schedule(TOTAL, TOKENS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cycles": 2, "cycle_length": 50}, "set cycles .* or cycle_length .*, not both"),
        ({"cycles": []}, "at least 1 item"),
        ({"cycles": 0}, "greater than 0"),
        ({"cycle_length": -0.5}, r"cycle_length\.[\s\S]* greater than 0"),
        ({"cycle_length": 0.0}, r"cycle_length\.[\s\S]* greater than 0"),
        ({"cycle_length": 2.5}, r"cycle_length\n.* 2.5 is neither a fraction"),
        ({"warmup": 2.5}, r"warmup\n.* 2.5 is neither a fraction"),
        ({"decay": 2.5}, r"decay[\s\S]* 2.5 is neither a fraction"),
        ({"cycles": 2, "rewarmup": 2.5}, r"rewarmup\n.* 2.5 is neither a fraction"),
        ({"lr_schedule": "exponential"}, "'inv' or 'power'"),
    ],
)
def test_contradictory_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AdamConfig(**fields)


def test_a_single_step_is_a_run() -> None:
    assert schedule(total=1)(0) == 2.0


def test_what_levanter_asks_an_optimizer() -> None:
    config = AdamConfig(learning_rate=0.5, warmup=10, lr_schedule="linear", min_lr_ratio=0.0)
    rate, other = config.lr_scheduler(110), config.lr_scheduler(num_train_steps=110, override_lr=2.0)
    for step, part in ((0, 0.0), (5, 0.5), (10, 1.0), (60, 0.5)):
        assert (rate(step), other(step)) == (pytest.approx(0.5 * part), pytest.approx(2.0 * part))
    with pytest.raises(UserError, match=r"takes parameters.*not a number of steps; lr_scheduler"):
        config.build(1000)  # pyright: ignore[reportArgumentType]
    with pytest.raises(AttributeError, match=r"no AdamConfig\.build_weight_decay_mask: use decay_mask\(params\)"):
        _ = config.build_weight_decay_mask  # pyright: ignore[reportAttributeAccessIssue]


class TestConstants:
    """Shapes given as blocks, beside their formulas."""

    @staticmethod
    def rate(shape: dict[str, Any], step: int, **fields: Any) -> float:
        settings = {"learning_rate": 0.5, "min_lr_ratio": 0.1, "warmup": 10, "lr_schedule": shape, **fields}
        tokens = TokenSchedule(BatchSchedule(Piecewise.from_phases([(0, 16)])), 32)
        return AdamConfig.model_validate(settings).schedule(110, tokens)(step)

    @pytest.mark.parametrize("step", [10, 37, 60, 110])
    def test_a_cosine_is_raised_to_the_exponent(self, step: int) -> None:
        cosine = (1 + math.cos(math.pi * (step - 10) / 100)) / 2
        expected = 0.5 * (0.1 + 0.9 * cosine**2.5)
        assert self.rate({"type": "cosine", "exponent": 2.5}, step) == pytest.approx(expected)

    @pytest.mark.parametrize("step", [10, 20, 40, 110])
    def test_an_inverse_square_root_has_a_timescale(self, step: int) -> None:
        expected = 0.5 * max(0.1, min(1.0, math.sqrt(20 / step)))
        assert self.rate({"type": "inv_sqrt", "timescale": 20}, step) == pytest.approx(expected)

    @pytest.mark.parametrize("step", [20, 60, 110])
    def test_a_power_law_has_a_scale_and_an_exponent(self, step: int) -> None:
        expected = min(0.5, max(0.05, 16 * 2.0 * (step * 16 * 32) ** -0.5))
        assert self.rate({"type": "power", "a": 2.0, "b": -0.5}, step) == pytest.approx(expected)

    @pytest.mark.parametrize("name", ["constant", "linear", "cosine", "inv", "power"])
    def test_a_block_without_constants_is_its_name(self, name: ScheduleName) -> None:
        tokens = TokenSchedule(BatchSchedule(Piecewise.from_phases([(0, 16)])), 32)
        named = AdamConfig(lr_schedule=name).schedule(110, tokens)
        block = AdamConfig.model_validate({"lr_schedule": {"type": name}}).schedule(110, tokens)
        assert [named(step) for step in range(111)] == [block(step) for step in range(111)]

    @pytest.mark.parametrize(
        "shape", [{"type": "cosine", "exponent": 0}, {"type": "power", "b": 0.5}, {"type": "linear", "exponent": 2}]
    )
    def test_constants_that_make_no_decay_are_refused(self, shape: dict[str, Any]) -> None:
        with pytest.raises(ValidationError):
            AdamConfig.model_validate({"lr_schedule": shape})
