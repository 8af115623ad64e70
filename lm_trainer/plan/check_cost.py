"""Expected time of checks of the hardware during a run (`trainer.cross_check`), by formula."""

from __future__ import annotations

from dataclasses import dataclass

from lm_trainer.plan.communication import gather_seconds
from lm_trainer.plan.layout_work import LayoutWork
from lm_trainer.plan.machine import Machine
from lm_trainer.plan.speed import microbatch_seconds


@dataclass(frozen=True)
class CheckCost:
    """Time of the checks of a run."""

    every: int
    """Number of steps between checks."""
    seconds: float
    """Time of one check."""
    share: float
    """Time of all checks, relative to the time of all steps without them."""


def check_cost(work: LayoutWork, machine: Machine | None, step_seconds: float) -> CheckCost | None:
    """Returns the time of the checks of a run; None if it makes none.

    At a check, every device computes one more microbatch, for which it gathers the parameters again if it gathers one
    layer at a time, and reads the gradients of two microbatches for their checksums. Communication is not assumed to
    overlap, and the host's wait is not counted.

    Args:
        work: work of a step.
        machine: figures of a device; None if they are unknown, or an MFU is assumed. A check then takes a microbatch's
            part of the step.
        step_seconds: time of a step without a check.
    """
    config = work.trainer.cross_check
    if config is None:
        return None
    if machine is None:
        seconds = step_seconds / work.microbatches
    else:
        checksums = 2 * work.params * work.gradient_itemsize / machine.memory_rate
        seconds = microbatch_seconds(work, machine) + gather_seconds(work, machine) + checksums
    return CheckCost(config.every, seconds, seconds / (config.every * step_seconds))
