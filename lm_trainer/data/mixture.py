"""Determines from which set each training row comes.

Every prefix keeps the proportions, which may change at given steps.

The sets alternate in a fixed cycle, not at random. In every prefix, the number of rows of a set is within one row of
its share, and the set of any position can be computed without the positions before it.

Shape letters: N positions, C positions of a cycle, K sets.
"""

from __future__ import annotations

import difflib
import heapq
import itertools
import math
import re
from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

RESOLUTION = 1 << 16
"""Maximum number of positions in a cycle. Weights that need a longer cycle are rounded to multiples of its inverse."""


def check_set_names(names: Collection[str]) -> None:
    """Checks that the name of every set is a valid directory name and is not nested in the name of another set.

    Raises:
        ValueError: if a name is invalid; gives the name.
    """
    if bad := [name for name in names if not re.fullmatch(r"(?!\.)[\w.-]+(/(?!\.)[\w.-]+)*", name)]:
        raise ValueError(f"configs: a set cannot be called {bad[0]!r}; use letters, digits, `_`, `-`, `.` and `/`")
    for name in names:
        if inside := [child for child in names if child.startswith(f"{name}/")]:
            raise ValueError(f"configs: the cache of {inside[0]!r} would lie inside that of {name!r}; rename one")


def check_known_sets(key: str, names: Iterable[str], sets: Collection[str]) -> None:
    """Checks that a key names only existing sets.

    Raises:
        ValueError: if it does not; gives the first unknown name.
    """
    if unknown := [name for name in names if name not in sets]:
        near = difflib.get_close_matches(unknown[0], sets, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sets)}"
        raise ValueError(f"{key}: there is no set {unknown[0]}; {hint}")


def check_steps(steps: Sequence[int]) -> None:
    """Checks that weights change at increasing steps, starting at 0.

    Raises:
        ValueError: if they do not.
    """
    if not steps or steps[0] != 0 or any(a >= b for a, b in itertools.pairwise(steps)):
        raise ValueError(f"train_weights: the steps of its stages must begin at 0 and rise, got {steps}")


def cycle_counts(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns the number of positions of each weight in the shortest cycle. It is exact if the cycle fits `RESOLUTION`.

    Raises:
        ValueError: if no weight is positive, or a weight is too small for a single position.
    """
    # Uses the decimal that the user wrote, not the nearest binary fraction, so that 0.1 is exactly a tenth.
    parts = [Fraction(repr(weight)) for weight in weights]
    total = sum(parts)
    if total <= 0 or min(parts) < 0:
        raise ValueError("weights must not be negative, and one at least must be above 0")
    parts = [part / total for part in parts]
    length = math.lcm(*(part.denominator for part in parts))
    if length > RESOLUTION:
        parts = [part * RESOLUTION for part in parts]
        counts = [math.floor(part) for part in parts]
        # Largest remainder method: positions left over from rounding down go to the sets that lost the most.
        by_remainder = sorted(range(len(parts)), key=lambda index: counts[index] - parts[index])
        for index in by_remainder[: RESOLUTION - sum(counts)]:
            counts[index] += 1
    else:
        counts = [int(part * length) for part in parts]
    if any(weight > 0 and count == 0 for weight, count in zip(weights, counts, strict=True)):
        raise ValueError(f"a weight is below 1/{RESOLUTION} of all weights; raise it, or set it to 0")
    divisor = math.gcd(*counts)
    return tuple(count // divisor for count in counts)


class MixtureCycle(NamedTuple):
    """Order of the sets, which is repeated until the weights change."""

    sets_C: np.ndarray
    """int16: the set of each position."""
    draws_C: np.ndarray
    """int32: number of earlier occurrences in the cycle of the position's set."""


@lru_cache(maxsize=64)
def mixture_cycle(counts: tuple[int, ...]) -> MixtureCycle:
    """Computes the cycle in which, for every prefix, the number of rows of each set is within one row of its share.

    Draw j of a set with c of L positions must fall in [floor(jL/c), ceil((j+1)L/c)). Serving the earliest deadline
    first meets all deadlines (Baruah et al., "Proportionate progress", Algorithmica 15, 1996).
    """
    length = sum(counts)
    sets = np.repeat(np.arange(len(counts)), counts)
    numbers = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
    shares_of = np.repeat(np.asarray(counts, np.int64), counts)
    releases = numbers * length // shares_of
    deadlines = -(-(numbers + 1) * length // shares_of)
    order = np.argsort(releases, kind="stable")
    # A single number encodes the deadline and the set, because the heap compares numbers faster than pairs.
    jobs = (deadlines * len(counts) + sets)[order].tolist()
    # For each position, the number of jobs released by then. The heap is never empty, since the shares fill the cycle.
    first_job_after = np.searchsorted(releases[order], np.arange(length), side="right").tolist()
    ready: list[int] = []
    num_released, served = 0, []
    for stop in first_job_after:
        for job in jobs[num_released:stop]:
            heapq.heappush(ready, job)
        num_released = stop
        served.append(heapq.heappop(ready) % len(counts))
    sets_C = np.asarray(served, np.int16)
    draws_C = np.empty(length, np.int32)
    for index, count in enumerate(counts):
        draws_C[sets_C == index] = np.arange(count)
    return MixtureCycle(sets_C, draws_C)


class Mixture:
    """Maps each position of training to its set and to the number of the draw within the set.

    A set's draws are 0, 1, 2, ... regardless of the weights, so changing weights neither skips nor repeats rows.

    Args:
        stages: (first position, shares of the sets) of each stage. The first stage begins at 0, and positions increase.
    """

    def __init__(self, stages: Sequence[tuple[int, tuple[int, ...]]]):
        self._starts = np.asarray([start for start, _ in stages], np.int64)
        self._shares = [counts for _, counts in stages]
        # The number of draws of each set before each stage.
        self._before = [np.zeros(len(self._shares[0]), np.int64)]
        for counts, length in zip(self._shares, np.diff(self._starts).tolist(), strict=False):
            self._before.append(self._before[-1] + _count_draws(counts, length))

    def locate_draws(self, positions_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the set of each position, and the number of the draw within the set: two int64 [N]."""
        positions_N = np.asarray(positions_N, np.int64)
        sets_N, draws_N = np.empty_like(positions_N), np.empty_like(positions_N)
        stages_N = np.searchsorted(self._starts, positions_N, side="right") - 1
        for stage in np.unique(stages_N).tolist():
            indices = np.flatnonzero(stages_N == stage)
            counts = self._shares[stage]
            cycles, offsets = np.divmod(positions_N[indices] - self._starts[stage], sum(counts))
            sets = mixture_cycle(counts).sets_C[offsets].astype(np.int64)
            sets_N[indices] = sets
            draws_N[indices] = (
                self._before[stage][sets] + cycles * np.asarray(counts)[sets] + mixture_cycle(counts).draws_C[offsets]
            )
        return sets_N, draws_N

    def count_draws(self, position: int) -> np.ndarray:
        """Returns the number of rows of each set before this position: int64 [K]."""
        stage = int(np.searchsorted(self._starts, position, side="right")) - 1
        return self._before[stage] + _count_draws(self._shares[stage], position - int(self._starts[stage]))

    def position_of_draw(self, index: int, draw: int) -> int | None:
        """Returns the position of a draw of a set; None if the weights never reach it."""
        for stage, counts in enumerate(self._shares):
            remaining = draw - int(self._before[stage][index])
            last = stage + 1 == len(self._shares)
            if counts[index] and (last or draw < self._before[stage + 1][index]):
                full, remaining = divmod(remaining, counts[index])
                offset = int(np.flatnonzero(mixture_cycle(counts).sets_C == index)[remaining])
                return int(self._starts[stage]) + full * sum(counts) + offset
        return None


def _count_draws(counts: tuple[int, ...], length: int) -> np.ndarray:
    """Returns the number of rows of each set in the first `length` positions of a stage: int64 [K]."""
    full, remaining = divmod(length, sum(counts))
    counts_K = np.asarray(counts, np.int64)
    if not remaining:
        return full * counts_K
    return full * counts_K + np.bincount(mixture_cycle(counts).sets_C[:remaining], minlength=len(counts))
