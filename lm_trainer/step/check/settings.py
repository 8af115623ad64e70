"""Configuration of the check that `lm_trainer/step/check/cross_check.py` makes."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from lm_trainer.core.config import Config


class CrossCheckConfig(Config):
    """A check of the hardware during the run: other devices compute microbatches again, and all bits are compared.

    At a check, every device computes one microbatch of another device again, with the same program, before the weights
    are updated. The microbatches are drawn from the seed. If loss or gradient differ in any bit, a third device also
    computes the microbatch, and the device that was wrong is named. A single device computes its own microbatch twice,
    which finds only errors that do not repeat. The check changes no bit of the run.
    """

    every: PositiveInt = 200
    """Number of steps between checks."""
    on_mismatch: Literal["stop", "repair"] = "stop"
    """`stop`: save a checkpoint of the state before the step, and end with exit code 77. `repair`: if the right value
    is known, compute the gradient of the step again and continue with it; if it is wrong again, do the same as
    `stop`."""
