"""Piecewise constant values, which change at given steps of a run."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from pydantic import AfterValidator, BeforeValidator, NonNegativeInt, PositiveInt, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from lm_trainer.core.config import Config

T = TypeVar("T")


@dataclass(frozen=True)
class Piecewise(Generic[T]):
    """A piecewise constant function of the step. Each value holds from its start, counted from 0, to the next start."""

    starts: tuple[int, ...]
    values: tuple[T, ...]

    @classmethod
    def from_phases(cls, phases: Sequence[tuple[int, T]]) -> Piecewise[T]:
        """Builds the function from (start, value) pairs.

        Raises:
            ValueError: if the first pair does not start at 0 or the starts are not increasing.
        """
        starts = tuple(start for start, _ in phases)
        if not starts or starts[0] != 0:
            raise ValueError("the first phase must start at step 0")
        if any(a >= b for a, b in itertools.pairwise(starts)):
            raise ValueError(f"the phases must start at rising steps, got {list(starts)}")
        return cls(starts, tuple(value for _, value in phases))

    def start_of(self, value: T) -> int:
        """Returns the first step with this value, which must be in `values`."""
        return self.starts[self.values.index(value)]

    def at(self, step: int) -> T:
        """Returns the value at `step`."""
        return self.values[bisect.bisect_right(self.starts, step) - 1]


class IntPhase(Config):
    """One entry of an integer schedule."""

    start: NonNegativeInt
    """The first step with this value, counted from 0. The value holds until the next entry."""
    value: PositiveInt
    """The value from this step on."""


def _check_phases(phases: tuple[IntPhase, ...]) -> tuple[IntPhase, ...]:
    if not phases:
        raise ValueError("expected a whole number or a list of {start, value}, got an empty list")
    problems = {}
    if phases[0].start != 0:
        problems[0] = f"the first entry must start at step 0, got {phases[0].start}"
    for index, (earlier, later) in enumerate(itertools.pairwise(phases), 1):
        if later.start <= earlier.start:
            problems[index] = f"must be later than the entry before, which starts at {earlier.start}, got {later.start}"
    if problems:
        # Reports one error per entry, at its line. A plain ValueError would be reported at the line of the list.
        details = [
            InitErrorDetails(
                type=PydanticCustomError("value_error", "{text}", {"text": text}),
                loc=(index, "start"),
                input=phases[index].start,
            )
            for index, text in problems.items()
        ]
        raise ValidationError.from_exception_data("IntSchedule", details)
    return phases


IntSchedule = PositiveInt | Annotated[tuple[IntPhase, ...], AfterValidator(_check_phases)]
"""A positive integer, or a schedule of integers: `[{start: 0, value: 64}, {start: 1000, value: 128}]`."""


def to_piecewise(value: IntSchedule) -> Piecewise[int]:
    """Converts the value of a configuration key into a piecewise constant function of the step."""
    phases = (IntPhase(start=0, value=value),) if isinstance(value, int) else value
    return Piecewise.from_phases([(phase.start, phase.value) for phase in phases])


def _refuse_multiple_of_devices(value: Any) -> Any:
    if value == -1:
        raise ValueError(
            "-1 would be per_device_parallelism rows for each device, and a batch here does not depend on the devices; "
            "write per_device_parallelism times elastic_shards: with 4 and 8 of them, 32"
        )
    return value


BatchSizes = Annotated[IntSchedule, BeforeValidator(_refuse_multiple_of_devices)]
"""Number of rows in a global batch: a constant or a schedule."""


@dataclass(frozen=True)
class BatchSchedule:
    """The number of rows in the global batch of each step, and the position of the batch among all rows."""

    sizes: Piecewise[int]

    @classmethod
    def constant(cls, size: int) -> BatchSchedule:
        """Returns a schedule with the same size at every step."""
        return cls(Piecewise((0,), (size,)))

    def at(self, step: int) -> int:
        """Returns the number of rows in the batch of `step`."""
        return self.sizes.at(step)

    def rows_before(self, step: int) -> int:
        """Returns the number of rows in all batches before the batch of `step`. Takes the same time for any `step`."""
        # Each phase contributes its number of steps before `step` times its size.
        starts = (*self.sizes.starts, step)
        ends = [min(end, step) for end in starts[1:]]
        return sum(
            max(0, end - start) * size
            for start, end, size in zip(self.sizes.starts, ends, self.sizes.values, strict=True)
        )


@dataclass(frozen=True)
class TokenSchedule:
    """The number of tokens trained on before each step. All rows have the same length."""

    batch: BatchSchedule
    seq_len: int

    def tokens_before(self, step: int) -> int:
        """Returns the number of tokens in all batches before the batch of `step`."""
        return self.batch.rows_before(step) * self.seq_len
