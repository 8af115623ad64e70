"""Recipe of a ladder: batch, length, optimizer, learning rate and checkpoints as functions of the model size."""

from __future__ import annotations

import math
from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator
from rich.console import Console

from lm_trainer.core.config import Config, or_instance_of
from lm_trainer.core.errors import UserError
from lm_trainer.core.files import AnyPath, local_path
from lm_trainer.ladder.picture import rate_plot
from lm_trainer.ladder.rate_law import RateLaw
from lm_trainer.optim import AdamConfig, AnyOptimizer
from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.schedule import Schedule
from lm_trainer.plot import SchedulePlot, save_image, to_text

_REFERENCE_PARAMS, _REFERENCE_BATCH, _REFERENCE_RATE = 108e6, 2048 * 160, 0.0047
"""Number of parameters, batch size and learning rate of a reference model of Porian et al. 2024 (arXiv 2406.19146), as
in OLMo-core."""
_LARGE_BATCH = 524_288
"""Minimum batch size in tokens for a beta2 of 0.95 (Porian et al. 2024, table 4)."""
_SCHEDULE_KEYS = (
    *("learning_rate", "min_lr_ratio", "lr_schedule", "warmup", "rewarmup", "decay"),
    *("cycles", "cycle_length", "cycle_peaks"),
)


class Period(NamedTuple):
    """One period of WSD-S, in steps: warm-up (only in the first period), constant peak, and linear decay to 0."""

    multiple: float
    """Length of the run at the end of the period, as a multiple of the Chinchilla-optimal number of tokens."""
    start: int
    end: int
    decay: int
    peak: float
    """Peak learning rate, as a multiple of the run's learning rate."""

    @property
    def pre_decay(self) -> int:
        """The last step before the decay."""
        return self.end - self.decay


class RunConfigurator(Config):
    """Maps the number of parameters, as counted by `ModelLadder.get_num_params`, to the settings of a run.

    All batch sizes and lengths are in tokens. For use in Python, a subclass is enough.
    """

    type: str = "own"

    @abstractmethod
    def configure_target_batch_size(self, num_params: int) -> int:
        """Returns the target batch size. The actual batch size is rounded to complete rows and microbatches."""

    @abstractmethod
    def configure_duration(self, num_params: int, batch_size: int) -> int:
        """Returns the length of the run."""

    @abstractmethod
    def configure_optimizer(self, num_params: int, batch_size: int) -> OptimizerConfig:
        """Returns the optimizer, including its learning rate schedule."""

    @abstractmethod
    def configure_checkpoint_intervals(self, num_params: int, batch_size: int) -> list[tuple[int, str]]:
        """Returns (tokens, name) of every checkpoint of the ladder, in order."""

    @property
    def rate_follows_from_size(self) -> bool:
        """Returns True if the learning rate depends on the number of parameters other than by length and batch."""
        return True

    def configure_lr_scheduler(self, num_params: int, batch_size: int) -> Schedule:
        """Returns the learning rate as a function of the step."""
        steps = self.configure_duration(num_params, batch_size) // batch_size
        return self.configure_optimizer(num_params, batch_size).schedule(steps)

    def lr_plot(self, num_params: int, batch_size: int, optimizer: OptimizerConfig | None = None) -> SchedulePlot:
        """Plots the learning rate, with the ladder's checkpoints; `optimizer` replaces the optimizer of the size."""
        steps = self.configure_duration(num_params, batch_size) // batch_size
        checkpoints = [
            tokens // batch_size for tokens, _ in self.configure_checkpoint_intervals(num_params, batch_size)
        ]
        of_size = self.configure_lr_scheduler(num_params, batch_size)
        return rate_plot(of_size if optimizer is None else optimizer.schedule(steps), steps, checkpoints)

    def plot_lr_schedule(
        self, num_params: int, batch_size: int, *, show: bool = True, save_path: AnyPath | None = None
    ) -> Path | None:
        """Plots the learning rate in the terminal, to an image file, or both. Returns the path of the file."""
        path = None if save_path is None else local_path(save_path)
        plot = self.lr_plot(num_params, batch_size)
        if show:
            Console().print(to_text(plot), highlight=False, markup=False)
        if path is not None:
            save_image(plot, path)
        return path


class WSDSChinchillaRunConfigurator(RunConfigurator):
    """WSD-S (Wen et al. 2024, arXiv 2410.05192): one run whose decays end at 0.5, 1, 2, 4 ... times Chinchilla.

    After every decay the learning rate jumps back to its peak, so a run can always be extended.
    """

    type: Literal["wsds_chinchilla"] = "wsds_chinchilla"
    chinchilla_multiple: float = Field(ge=0.5)
    """Length of each run, as a multiple of the Chinchilla-optimal number of tokens; must be a power of two."""
    decay_fraction: float = Field(default=0.1, ge=0.1, lt=0.5)
    """Length of the decay at the end of each period, as a fraction of the period; at least 0.1."""
    tokens_per_param: PositiveInt = 20
    """Number of tokens per parameter of a Chinchilla-optimal run."""
    lr_multiplier: PositiveFloat = 1.0
    """Factor that multiplies the learning rate."""
    learning_rate_law: RateLaw | None = None
    """Law of the learning rate in the tokens of a run and of a batch. `null`: a rate that follows from the number of
    parameters alone."""
    stepped_schedule: bool = False
    """Lowers the peak of the period that ends at c times Chinchilla to 1 / sqrt(c) of the learning rate."""
    optimizer: AnyOptimizer = AdamConfig(skip_bad_steps=True)
    """The optimizer without learning rate and schedule. beta2 depends on the batch size unless it is set here."""

    @field_validator("chinchilla_multiple")
    @classmethod
    def _check_power_of_two(cls, value: float) -> float:
        if not math.log2(value).is_integer():
            near = 2.0 ** round(math.log2(value))
            raise ValueError(f"expected a power of two (0.5, 1, 2, 4 ...), got {value:g}; the nearest is {near:g}")
        return value

    @model_validator(mode="after")
    def _reject_schedule_keys(self) -> WSDSChinchillaRunConfigurator:
        if keys := [key for key in _SCHEDULE_KEYS if key in self.optimizer.changed_fields]:
            raise ValueError(f"optimizer.{keys[0]} follows from the size; remove it (lr_multiplier scales the rate)")
        return self

    @property
    def multiples(self) -> tuple[float, ...]:
        """Lengths at which decays end, in multiples of Chinchilla: 0.5, 1, 2 ... up to `chinchilla_multiple`."""
        return tuple(2.0**power for power in range(-1, int(math.log2(self.chinchilla_multiple)) + 1))

    def configure_target_batch_size(self, num_params: int) -> int:
        # B = 327,680 (N / 108e6)^(2/3) (Porian et al. 2024), in the form that OLMo-core uses.
        return round(_REFERENCE_BATCH * (num_params / _REFERENCE_PARAMS) ** (2 / 3))

    def configure_duration(self, num_params: int, batch_size: int) -> int:
        return batch_size * self._num_steps(num_params, batch_size, self.chinchilla_multiple)

    def learning_rate(self, num_params: int, batch_size: int) -> float:
        """Computes the peak learning rate. Without a law it is half the rate of Porian et al., which OLMo-core found to
        be better.
        """
        if self.learning_rate_law is not None:
            tokens = self.configure_duration(num_params, batch_size)
            return self.learning_rate_law.rate(tokens, batch_size) * self.lr_multiplier
        return _REFERENCE_RATE * (num_params / _REFERENCE_PARAMS) ** (-1 / 3) / 2 * self.lr_multiplier

    @property
    def rate_follows_from_size(self) -> bool:
        return self.learning_rate_law is None

    def periods(self, num_params: int, batch_size: int) -> tuple[Period, ...]:
        """Returns the periods of a run in whole steps. Decays are rounded up.

        Raises:
            UserError: if a period has no step before its decay.
        """
        ends = [self._num_steps(num_params, batch_size, multiple) for multiple in self.multiples]
        periods = []
        for multiple, start, end in zip(self.multiples, (0, *ends), ends, strict=False):
            # Round in tokens first, as OLMo-core does; -(-a // b) divides and rounds up.
            decay = -(-round(self.decay_fraction * (end - start) * batch_size) // batch_size)
            if end - start <= decay:
                raise UserError(
                    f"{num_params:,} parameters with a batch of {batch_size:,} tokens have {end - start} steps in the "
                    f"period up to {multiple:g}xC, too few for a decay; raise tokens_per_param or the size"
                )
            # Assumes that the rate is optimal at 1xC, and that the optimum is inversely proportional to sqrt(length).
            peak = 1 / math.sqrt(multiple) if self.stepped_schedule else 1.0
            periods.append(Period(multiple, start, end, decay, peak))
        return tuple(periods)

    def warmup(self, num_params: int, batch_size: int) -> int:
        """Returns the number of warm-up steps: one token per parameter, rounded up to whole steps.

        Raises:
            UserError: if the warm-up does not fit into the first period.
        """
        steps, first = -(-num_params // batch_size), self.periods(num_params, batch_size)[0]
        if steps > first.pre_decay:
            raise UserError(
                f"the warm-up ({steps} steps) and the first decay ({first.decay} steps) do not fit into the "
                f"{first.end} steps of the first period; raise tokens_per_param or lower decay_fraction"
            )
        return steps

    def configure_optimizer(self, num_params: int, batch_size: int) -> OptimizerConfig:
        periods = self.periods(num_params, batch_size)
        values = {
            **self.optimizer.model_dump(mode="json"),
            "learning_rate": self.learning_rate(num_params, batch_size),
            "lr_schedule": "linear",
            "min_lr_ratio": 0.0,
            "warmup": self.warmup(num_params, batch_size),
            "cycles": [period.end for period in periods],
            "decay": [period.decay for period in periods],
        }
        if self.stepped_schedule:
            values["cycle_peaks"] = [period.peak for period in periods]
        # Small batches have noisier gradients, so the second moment is averaged over more steps.
        if "beta2" in type(self.optimizer).model_fields and "beta2" not in self.optimizer.changed_fields:
            values["beta2"] = 0.95 if batch_size >= _LARGE_BATCH else 0.99
        return type(self.optimizer).model_validate(values)

    def configure_checkpoint_intervals(self, num_params: int, batch_size: int) -> list[tuple[int, str]]:
        names = []
        for number, period in enumerate(self.periods(num_params, batch_size), 1):
            name = f"period {number}, {period.multiple:g}xC"
            names.append((period.pre_decay * batch_size, f"{name} pre-decay"))
            names.append((period.end * batch_size, f"{name} post-decay"))
        return names

    def _num_steps(self, num_params: int, batch_size: int, multiple: float) -> int:
        # Rounds down to whole tokens, then to the nearest step, in the same order as OLMo-core.
        return round(int(self.tokens_per_param * num_params * multiple) / batch_size)


# Objects made in Python need no type. Configuration files use the class listed here.
AnyRunConfigurator = Annotated[WSDSChinchillaRunConfigurator, or_instance_of(RunConfigurator)]
