"""The work of a run in FLOPs, and the time and money that it takes on devices by their datasheet."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from lm_trainer.plan.devices import DeviceGroup
from lm_trainer.profile.peaks import Peak, datasheet_peak, tf32_allowed
from lm_trainer.run.config.trainer_config import TrainerConfig

MFU = 0.4
"""The part of the datasheet's peak that training is assumed to reach."""


@dataclass(frozen=True)
class Work:
    """The computation of a run, by the definition of model FLOPs."""

    flops_per_token: int
    """FLOPs of a training step, forward and backward, for each token."""
    tokens_per_step: int
    """In the first step."""
    steps: int
    tokens: int
    """In all steps."""

    @property
    def flops_per_step(self) -> int:
        """FLOPs of the first step."""
        return self.flops_per_token * self.tokens_per_step

    @property
    def flops(self) -> int:
        """FLOPs of all steps."""
        return self.flops_per_token * self.tokens


@dataclass(frozen=True)
class Time:
    """The time of a run at the assumed MFU."""

    peak: float
    """FLOP/s of one device, by its datasheet."""
    step_seconds: float
    """Seconds of the first step."""
    seconds: float
    """Seconds of all steps, without start, evaluation and checkpoints."""
    device_hours: float
    cost: float | None
    """In the currency of the price; None without one."""


def training_time(
    work: Work, group: DeviceGroup, trainer: TrainerConfig, *, mfu: float = MFU, price: float | None = None
) -> Time | None:
    """The time of a run on some devices; None where no datasheet has a figure.

    Args:
        work: of the run.
        group: the devices.
        trainer: of the run; precision and settings of JAX decide in which format matrices are multiplied.
        mfu: part of the datasheet's peak that is reached.
        price: of a device for an hour, in any currency.
    """
    peak = training_peak(group.kind, trainer)
    if peak is None:
        return None
    # The assumed MFU stands for everything beside products: communication, data, idle devices.
    rate = peak.flops * group.count * mfu
    hours = work.flops / rate / 3600 * group.count
    return Time(
        peak=peak.flops,
        step_seconds=work.flops_per_step / rate,
        seconds=work.flops / rate,
        device_hours=hours,
        cost=None if price is None else hours * price,
    )


def training_peak(kind: str, trainer: TrainerConfig) -> Peak | None:
    """The peak of one device for the matrix products of a run; None where no datasheet has a figure."""
    # A plan need not have set JAX up as the run will.
    name = "jax_default_matmul_precision"
    precision = trainer.jax_config.get(name, jax.config.values[name])
    return datasheet_peak(kind, trainer.mp.compute, allow_tf32=tf32_allowed(precision))  # pyright: ignore[reportArgumentType]
