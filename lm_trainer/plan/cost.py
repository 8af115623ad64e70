"""FLOPs of a run, and its expected time and cost on given devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax

from lm_trainer.plan.check_cost import CheckCost, check_cost
from lm_trainer.plan.devices import DeviceGroup
from lm_trainer.plan.layout_work import LayoutWork
from lm_trainer.plan.machine import Machine
from lm_trainer.plan.speed import StepCost, step_bound, step_cost
from lm_trainer.profile.devices import device_bandwidths
from lm_trainer.profile.efficiency import device_efficiency
from lm_trainer.profile.peaks import Peak, datasheet_peak, is_tf32_allowed
from lm_trainer.run.config.trainer_config import TrainerConfig

MFU = 0.4
"""Model FLOP utilisation that is assumed for devices without known bandwidths."""


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
    """Expected time of a run, or its time at an assumed MFU."""

    peak: float
    """Peak FLOP/s of one device, from its datasheet."""
    step_seconds: float
    """Duration of the first step in seconds."""
    seconds: float
    """Duration of all steps and of the checks of the hardware in seconds, without start-up, evaluation and checkpoints.
    """
    device_hours: float
    cost: float | None
    """Cost in the currency of the price; None if no price is given."""
    mfu: float
    """Model FLOP utilisation: expected or assumed."""
    tokens_per_second_per_device: float
    expected: StepCost | None
    """Parts of the expected time of the largest step; None if the MFU is assumed."""
    checks: CheckCost | None = None
    """Cost of the checks of the hardware; None if the run makes none, or the layout is unknown."""
    bound_seconds: float | None = None
    """Lower bound of the duration of the first step by the rates of the datasheet, see `step_bound`; None if the MFU is
    assumed."""


def training_time(
    work: RunWork,
    group: DeviceGroup,
    trainer: TrainerConfig,
    *,
    layout: LayoutWork | None = None,
    mfu: float | None = None,
    price: float | None = None,
) -> RunTime | None:
    """Returns the time of a run on a device group; None if no datasheet has a peak for it.

    Args:
        work: the amount of computation of the run.
        group: the devices.
        trainer: trainer configuration, whose precision and JAX settings determine the format of matrix products.
        layout: the work of the largest step. All steps are assumed to process tokens at its rate.
        mfu: fraction of the datasheet's peak that training reaches; None: as expected for the layout, or `MFU` without
            a layout or the device's bandwidths.
        price: price per device-hour, in any currency.
    """
    peak = training_peak(group.kind, trainer)
    if peak is None:
        return None
    machine = training_machine(group.kind, trainer)
    expected = None if mfu is not None or layout is None or machine is None else step_cost(layout, machine)
    bound = None
    if expected is not None and layout is not None and machine is not None:
        bound = step_bound(layout, machine) * work.tokens_per_step / layout.tokens_per_step
        mfu = work.flops_per_token * layout.tokens_per_step / expected.seconds / (peak.flops * group.count)
    utilisation = MFU if mfu is None else mfu
    rate = peak.flops * group.count * utilisation
    checks = None
    if layout is not None:
        largest_step = work.flops_per_token * layout.tokens_per_step / rate
        checks = check_cost(layout, None if expected is None else machine, largest_step)
    seconds = work.flops / rate * (1 if checks is None else 1 + checks.share)
    hours = seconds / 3600 * group.count
    return RunTime(
        peak=peak.flops,
        step_seconds=work.flops_per_step / rate,
        seconds=seconds,
        device_hours=hours,
        cost=None if price is None else hours * price,
        mfu=utilisation,
        tokens_per_second_per_device=rate / work.flops_per_token / group.count,
        expected=expected,
        checks=checks,
        bound_seconds=bound,
    )


def training_peak(kind: str, trainer: TrainerConfig) -> Peak | None:
    """Returns the peak of one device for the matrix products of a run; None if no datasheet has one."""
    # The configuration of JAX in this process may differ from its configuration in the run.
    name = "jax_default_matmul_precision"
    precision = trainer.jax_config.get(name, jax.config.values[name])
    return datasheet_peak(kind, trainer.mp.compute, allow_tf32=is_tf32_allowed(precision))  # pyright: ignore[reportArgumentType]


def training_machine(kind: str, trainer: TrainerConfig, mfu: float | None = None) -> Machine | None:
    """Returns the figures of a device for the cost model; None if no datasheet has them.

    Args:
        kind: equal to `jax.Device.device_kind`.
        trainer: trainer configuration.
        mfu: fraction of the peak that products and attention reach, instead of their measured efficiency.
    """
    peak, bandwidths, efficiency = training_peak(kind, trainer), device_bandwidths(kind), device_efficiency(kind)
    if peak is None or bandwidths is None or efficiency is None:
        return None
    if mfu is not None:
        at_mfu = {"products": mfu, "attention_forward": mfu, "attention_backward": mfu}
        efficiency = replace(efficiency, **at_mfu, narrow_heads=0.0, in_step=1.0)
    return Machine(kind, peak.flops, bandwidths, efficiency)
