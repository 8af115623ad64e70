"""Values that change at given steps of a run."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Steps(Generic[T]):
    """A value that holds from each start, in steps counted from 0, until the next one."""

    starts: tuple[int, ...]
    values: tuple[T, ...]

    @classmethod
    def make(cls, phases: Sequence[tuple[int, T]]) -> Steps[T]:
        """From (start, value) pairs.

        Raises:
            ValueError: when the first does not start at 0 or the starts do not rise.
        """
        starts = tuple(start for start, _ in phases)
        if not starts or starts[0] != 0:
            raise ValueError("the first phase must start at step 0")
        if any(a >= b for a, b in itertools.pairwise(starts)):
            raise ValueError(f"the phases must start at rising steps, got {list(starts)}")
        return cls(starts, tuple(value for _, value in phases))

    def at(self, step: int) -> T:
        """The value at `step`."""
        return self.values[bisect.bisect_right(self.starts, step) - 1]


@dataclass(frozen=True)
class BatchSchedule:
    """How many rows the global batch of each step has, and where in the order of all rows it begins."""

    sizes: Steps[int]

    @classmethod
    def constant(cls, size: int) -> BatchSchedule:
        """The same size at every step."""
        return cls(Steps((0,), (size,)))

    def at(self, step: int) -> int:
        """Rows in the batch of `step`."""
        return self.sizes.at(step)

    def rows_before(self, step: int) -> int:
        """Rows in all batches before that of `step`, in time that does not grow with `step`."""
        starts = (*self.sizes.starts, step)
        ends = [min(end, step) for end in starts[1:]]
        return sum(
            max(0, end - start) * size
            for start, end, size in zip(self.sizes.starts, ends, self.sizes.values, strict=True)
        )
