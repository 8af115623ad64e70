"""FLOPs of a run, and its time and cost on given devices based on their datasheets."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from lm_trainer.plan.devices import DeviceGroup
from lm_trainer.profile.peaks import Peak, datasheet_peak, is_tf32_allowed
from lm_trainer.run.config.trainer_config import TrainerConfig

MFU = 0.4
"""Default model FLOP utilisation: the fraction of the datasheet's peak that training reaches."""


@dataclass(frozen=True)
class RunWork:
    """Amount of computation of a run, by the definition of model FLOPs."""

    flops_per_token: int
    """Number of FLOPs per token of a training step, forward and backward."""
    tokens_per_step: int
    """Number of tokens in the first step."""
    steps: int
    tokens: int
    """Number of tokens in all steps."""

    @property
    def flops_per_step(self) -> int:
        """Number of FLOPs of the first step."""
        return self.flops_per_token * self.tokens_per_step

    @property
    def flops(self) -> int:
        """Number of FLOPs of all steps."""
        return self.flops_per_token * self.tokens


@dataclass(frozen=True)
class RunTime:
    """Time of a run at the assumed MFU."""

    peak: float
    """Peak FLOP/s of one device, from its datasheet."""
    step_seconds: float
    """Duration of the first step in seconds."""
    seconds: float
    """Duration of all steps in seconds, without start-up, evaluation and checkpoints."""
    device_hours: float
    cost: float | None
    """Cost in the currency of the price; None if no price is given."""


def training_time(
    work: RunWork, group: DeviceGroup, trainer: TrainerConfig, *, mfu: float = MFU, price: float | None = None
) -> RunTime | None:
    """Returns the time of a run on a device group; None if no datasheet has a peak for it.

    Args:
        work: the amount of computation of the run.
        group: the devices.
        trainer: trainer configuration, whose precision and JAX settings determine the format of matrix products.
        mfu: fraction of the datasheet's peak that training reaches.
        price: price per device-hour, in any currency.
    """
    peak = training_peak(group.kind, trainer)
    if peak is None:
        return None
    # The assumed MFU accounts for everything except matrix products: communication, data loading, idle devices.
    rate = peak.flops * group.count * mfu
    hours = work.flops / rate / 3600 * group.count
    return RunTime(
        peak=peak.flops,
        step_seconds=work.flops_per_step / rate,
        seconds=work.flops / rate,
        device_hours=hours,
        cost=None if price is None else hours * price,
    )


def training_peak(kind: str, trainer: TrainerConfig) -> Peak | None:
    """Returns the peak of one device for the matrix products of a run; None if no datasheet has one."""
    # The configuration of JAX in this process may differ from its configuration in the run.
    name = "jax_default_matmul_precision"
    precision = trainer.jax_config.get(name, jax.config.values[name])
    return datasheet_peak(kind, trainer.mp.compute, allow_tf32=is_tf32_allowed(precision))  # pyright: ignore[reportArgumentType]
