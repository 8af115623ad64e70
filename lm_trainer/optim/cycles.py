"""Time table of a learning-rate schedule: cycles, and in each a warm-up, a stable phase and a decay."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from lm_trainer.core.config import fraction_or_steps

_EVEN = 0.01
"""A fraction that leaves less than this part of a cycle over is taken for 1 / n: 0.333 means thirds."""


class Cycle(NamedTuple):
    """One cycle, in steps; its learning rate is lowest at `end`, where the next one begins."""

    start: int
    warmup: int
    stable: int
    decay: int

    @property
    def decay_start(self) -> int:
        return self.start + self.warmup + self.stable

    @property
    def end(self) -> int:
        return self.decay_start + self.decay


class Lengths(NamedTuple):
    """Phases as a configuration has them: fractions of their cycle (floats up to 1.0) or numbers of steps."""

    warmup: float = 0
    """Warm-up of the first cycle."""
    rewarmup: float = 0
    """Warm-up of the others."""
    decay: float | Sequence[int] | None = None
    """None: all that follows the warm-up; a list: of each cycle, in steps."""


def cycle_ends(
    total: int, *, cycles: int | Sequence[int] | None = None, cycle_length: float | Sequence[int] | None = None
) -> tuple[int, ...]:
    """Returns the steps at which the cycles of a run of `total` steps end; the last is `total`.

    `cycles` is their number, all equally long to a step, or the steps at which they end, the last of which may be left
    out. `cycle_length` is their length, a fraction of the run (a float up to 1.0) or in steps, or a list of lengths in
    steps. Steps that are left over at the end are a last cycle.

    Raises:
        ValueError: when both are given, or cycles do not fit into the run or have less than two steps.
    """
    if cycles is not None and cycle_length is not None:
        raise ValueError("set cycles (how many, or where they end) or cycle_length (how long they are), not both")
    if cycles is not None:
        ends = _evenly(total, cycles) if isinstance(cycles, int) else list(cycles)
        key = f"cycles: {_shown(cycles)}"
    elif isinstance(cycle_length, Sequence):
        ends, key = list(itertools.accumulate(cycle_length)), f"cycle_length: {_shown(cycle_length)}"
    elif cycle_length is not None:
        ends, key = _by_length(total, cycle_length), f"cycle_length: {cycle_length}"
    else:
        return (total,)
    if not ends or ends[-1] > total:
        found = f"ends at step {ends[-1]}, but the run has {total} steps" if ends else "has no cycle"
        raise ValueError(f"{key} {found}; write fewer or shorter cycles, or null for a single one")
    if ends[-1] < total:
        ends.append(total)
    _check_lengths(ends, key)
    return tuple(ends)


def _evenly(total: int, count: int) -> list[int]:
    return [total * index // count for index in range(1, count + 1)]


def _by_length(total: int, length: float) -> list[int]:
    if isinstance(length, float) and 0 < length <= 1.0 and abs(1 / length - round(1 / length)) < _EVEN:
        return _evenly(total, round(1 / length))
    steps = fraction_or_steps(length, total)
    if steps == 0:
        raise ValueError(f"cycle_length: {length} is less than a step of a run of {total} steps")
    if steps > total:
        raise ValueError(f"cycle_length: {length} is longer than the run, which has {total} steps")
    return list(range(steps, total + 1, steps))


def _check_lengths(ends: Sequence[int], key: str) -> None:
    """Refuses a cycle of a single step, which would never leave its peak; a single cycle may have any length."""
    for number, (start, end) in enumerate(itertools.pairwise((0, *ends)), 1):
        if len(ends) > 1 and end - start < 2:
            raise ValueError(
                f"{key}: cycle {number} would go from step {start} to {end}; cycles must follow one another and have "
                f"at least 2 steps (a fraction has a point: 1.0 is the whole run, 1 a single step)"
            )


def plan_cycles(ends: Sequence[int], lengths: Lengths) -> tuple[Cycle, ...]:
    """Splits each cycle into its phases.

    Raises:
        ValueError: when the phases do not fit into their cycle, or decays are listed that are not one for each.
    """
    if isinstance(lengths.decay, Sequence) and len(lengths.decay) != len(ends):
        raise ValueError(f"decay: {_shown(lengths.decay)} lists {len(lengths.decay)} decays for {len(ends)} cycles")
    return tuple(
        _plan_cycle(number, start, end - start, lengths, several=len(ends) > 1)
        for number, (start, end) in enumerate(itertools.pairwise((0, *ends)), 1)
    )


def _plan_cycle(number: int, start: int, steps: int, lengths: Lengths, *, several: bool) -> Cycle:
    key, wanted = ("warmup", lengths.warmup) if number == 1 else ("rewarmup", lengths.rewarmup)
    warmup = fraction_or_steps(wanted, steps)
    asked_decay = lengths.decay[number - 1] if isinstance(lengths.decay, Sequence) else lengths.decay
    decay = max(0, steps - warmup) if asked_decay is None else fraction_or_steps(asked_decay, steps)
    stable = steps - warmup - decay
    if stable < 0:
        asked = f"{key} ({warmup} steps)" + (f" and decay ({decay} steps) do" if decay else " does")
        where = f"cycle {number}, steps {start} to {start + steps}" if several else f"{steps} training steps"
        advice = "; shorten them, write them as fractions of the cycle, or choose longer cycles" if several else ""
        raise ValueError(f"{asked} not fit into {where}{advice}")
    return Cycle(start, warmup, stable, decay)


def _shown(value: int | Sequence[int]) -> str:
    return str(value if isinstance(value, int) else list(value))
