"""Phases of a learning-rate schedule: cycles, each with a warm-up, a stable phase and a decay."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from lm_trainer.core.config import resolve_steps

_EVEN = 0.01
"""Maximum distance of 1 / cycle_length from an integer n at which the length is treated as 1 / n: 0.333 means
thirds."""


class Cycle(NamedTuple):
    """One cycle, in steps. Its learning rate is lowest at `end`, where the next cycle begins."""

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


class PhaseLengths(NamedTuple):
    """Lengths of the phases as configured: fractions of their cycle (floats up to 1.0) or numbers of steps."""

    warmup: float = 0
    """Warm-up of the first cycle."""
    rewarmup: float = 0
    """Warm-up of the other cycles."""
    decay: float | Sequence[int] | None = None
    """Decay at the end of each cycle. None: all steps after the warm-up; a list: a number of steps for each cycle."""


def cycle_ends(
    total: int, *, cycles: int | Sequence[int] | None = None, cycle_length: float | Sequence[int] | None = None
) -> tuple[int, ...]:
    """Returns the steps at which the cycles of a run of `total` steps end; the last of them is `total`.

    Steps that are left over at the end form a shorter last cycle.

    Args:
        total: number of steps of the run.
        cycles: number of cycles, whose lengths differ by at most one step, or the steps at which they end (the last may
            be omitted).
        cycle_length: length of the cycles, as a fraction of the run (a float up to 1.0) or a number of steps, or a list
            of numbers of steps.

    Raises:
        ValueError: if both are given, the cycles do not fit into the run, or a cycle has fewer than two steps.
    """
    if cycles is not None and cycle_length is not None:
        raise ValueError("set cycles (how many, or where they end) or cycle_length (how long they are), not both")
    if cycles is not None:
        ends = _divide_evenly(total, cycles) if isinstance(cycles, int) else list(cycles)
        key = f"cycles: {_format_value(cycles)}"
    elif isinstance(cycle_length, Sequence):
        ends, key = list(itertools.accumulate(cycle_length)), f"cycle_length: {_format_value(cycle_length)}"
    elif cycle_length is not None:
        ends, key = _ends_from_length(total, cycle_length), f"cycle_length: {cycle_length}"
    else:
        return (total,)
    if not ends or ends[-1] > total:
        problem = f"ends at step {ends[-1]}, but the run has {total} steps" if ends else "has no cycle"
        raise ValueError(f"{key} {problem}; write fewer or shorter cycles, or null for a single one")
    if ends[-1] < total:
        ends.append(total)
    _check_lengths(ends, key)
    return tuple(ends)


def _divide_evenly(total: int, count: int) -> list[int]:
    return [total * index // count for index in range(1, count + 1)]


def _ends_from_length(total: int, length: float) -> list[int]:
    if isinstance(length, float) and 0 < length <= 1.0 and abs(1 / length - round(1 / length)) < _EVEN:
        return _divide_evenly(total, round(1 / length))
    steps = resolve_steps(length, total)
    if steps == 0:
        raise ValueError(f"cycle_length: {length} is less than a step of a run of {total} steps")
    if steps > total:
        raise ValueError(f"cycle_length: {length} is longer than the run, which has {total} steps")
    return list(range(steps, total + 1, steps))


def _check_lengths(ends: Sequence[int], key: str) -> None:
    """Rejects cycles of a single step, which would stay at the peak. The only cycle of a run may have any length."""
    for number, (start, end) in enumerate(itertools.pairwise((0, *ends)), 1):
        if len(ends) > 1 and end - start < 2:
            raise ValueError(
                f"{key}: cycle {number} would go from step {start} to {end}; cycles must follow one another and have "
                f"at least 2 steps (a fraction has a point: 1.0 is the whole run, 1 a single step)"
            )


def plan_cycles(ends: Sequence[int], lengths: PhaseLengths) -> tuple[Cycle, ...]:
    """Splits each cycle into its phases.

    Raises:
        ValueError: if the phases do not fit into their cycle, or the number of listed decays differs from the number of
            cycles.
    """
    if isinstance(lengths.decay, Sequence) and len(lengths.decay) != len(ends):
        raise ValueError(
            f"decay: {_format_value(lengths.decay)} lists {len(lengths.decay)} decays for {len(ends)} cycles"
        )
    return tuple(
        _plan_cycle(number, start, end - start, lengths, several=len(ends) > 1)
        for number, (start, end) in enumerate(itertools.pairwise((0, *ends)), 1)
    )


def _plan_cycle(number: int, start: int, steps: int, lengths: PhaseLengths, *, several: bool) -> Cycle:
    key, length = ("warmup", lengths.warmup) if number == 1 else ("rewarmup", lengths.rewarmup)
    warmup = resolve_steps(length, steps)
    decay_length = lengths.decay[number - 1] if isinstance(lengths.decay, Sequence) else lengths.decay
    decay = max(0, steps - warmup) if decay_length is None else resolve_steps(decay_length, steps)
    stable = steps - warmup - decay
    if stable < 0:
        phases = f"{key} ({warmup} steps)" + (f" and decay ({decay} steps) do" if decay else " does")
        span = f"cycle {number}, steps {start} to {start + steps}" if several else f"{steps} training steps"
        advice = "; shorten them, write them as fractions of the cycle, or choose longer cycles" if several else ""
        raise ValueError(f"{phases} not fit into {span}{advice}")
    return Cycle(start, warmup, stable, decay)


def _format_value(value: int | Sequence[int]) -> str:
    return str(value if isinstance(value, int) else list(value))
