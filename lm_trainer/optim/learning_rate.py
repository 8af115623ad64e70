"""Configuration keys of an optimizer that determine the learning rate over time."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from lm_trainer.core.config import Config, FractionOrSteps, resolve_steps
from lm_trainer.core.piecewise import TokenSchedule
from lm_trainer.optim.cycles import PhaseLengths, cycle_ends, plan_cycles
from lm_trainer.optim.decay_shape import DecayShape
from lm_trainer.optim.schedule import Constants, Schedule


class LearningRateConfig(Config):
    """The learning rate over time: cycles of warm-up, stable phase and decay."""

    refused_keys: ClassVar[Mapping[str, str]] = {"cooldown": "deprecated; use `decay`"}
    renamed_keys: ClassVar[Mapping[str, str]] = {"haps": "cycles", "warmup_ratio": "warmup"}

    learning_rate: PositiveFloat = 6e-4
    """The peak learning rate."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end of the decay, as a fraction of the peak."""
    warmup: FractionOrSteps = 0.01
    """Linear warm-up from 0 in the first cycle: a fraction of the cycle (a float up to 1.0) or a number of steps."""
    rewarmup: FractionOrSteps = 0.0
    """Linear warm-up of the later cycles from the final learning rate of the previous cycle, in the same units as
    `warmup`; 0: the learning rate jumps back to the peak. Has no effect on a single cycle."""
    decay: FractionOrSteps | Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    """Length of the decay at the end of each cycle, as a fraction of the cycle or a number of steps, or a list with a
    number of steps for each cycle; null: all steps after the warm-up. The learning rate is at the peak between warm-up
    and decay."""
    cycles: PositiveInt | Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    """Number of cycles of warm-up, peak and decay, or a list of the steps at which they end, where the learning rate is
    lowest. The end of the run may be omitted from the list."""
    cycle_length: PositiveInt | PositiveFloat | Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    """Alternative to `cycles`: length of each cycle as a fraction of the run (a float up to 1.0) or a number of steps,
    or a list of numbers of steps. Steps left over at the end of the run form a last, shorter cycle."""
    cycle_peaks: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] | None = None
    """Peak of each cycle as a multiple of `learning_rate`; null: 1 for all cycles."""
    lr_schedule: DecayShape = "cosine"
    """Shape of the decay: `constant`, `linear`, `cosine`, `inv_sqrt` (inverse square root), `inv` (inverse) or
    `power` (by the batch size and the number of tokens, with `learning_rate` as its limit); or a block with its
    constants, such as `{type: cosine, exponent: 2}`, `{type: inv_sqrt, timescale: 10000}`, `{type: power, a: 4}`."""

    def schedule(self, num_train_steps: int, tokens: TokenSchedule | None = None) -> Schedule:
        """Returns the learning rate as a function of the step, counted from 0.

        Args:
            num_train_steps: number of steps of the run.
            tokens: number of tokens of each step; only `power` needs it.

        Raises:
            ValueError: if cycles or phases do not fit into the run.
        """
        ends = cycle_ends(num_train_steps, cycles=self.cycles, cycle_length=self.cycle_length)
        cycles = plan_cycles(ends, PhaseLengths(self.warmup, self.rewarmup, self.decay))
        peaks = self.cycle_peaks or ()
        shape = self.lr_schedule
        name, constants = (shape, Constants()) if isinstance(shape, str) else (shape.type, shape.constants)
        return Schedule(name, cycles, self.learning_rate, self.min_lr_ratio, tokens, peaks, constants)

    def lr_scheduler(self, num_train_steps: int, override_lr: float | None = None) -> Schedule:
        """Same as `schedule`, under the name that Levanter uses. `override_lr` replaces the peak."""
        config = self if override_lr is None else self.model_copy(update={"learning_rate": override_lr})
        return config.schedule(num_train_steps)

    @field_validator("cycle_length")
    @classmethod
    def _is_a_length(cls, value: float | tuple[int, ...] | None) -> float | tuple[int, ...] | None:
        # An int is a number of steps; a float must be a fraction of the run or a whole number of steps.
        if isinstance(value, float):
            resolve_steps(value, 1)
        return value

    @model_validator(mode="after")
    def _cycles_are_said_once(self) -> Self:
        if self.cycles is not None and self.cycle_length is not None:
            raise ValueError("set cycles (how many, or where they end) or cycle_length (how long they are), not both")
        return self
