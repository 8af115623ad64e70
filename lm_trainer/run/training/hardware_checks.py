"""Checks of the hardware during training: when they are made, and the record of what they find."""

from __future__ import annotations

import json

from lm_trainer.core.files import append_line
from lm_trainer.health.alerts.sender import Alerts
from lm_trainer.parallel.processes import is_lead
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.files.directory import RunDirectory
from lm_trainer.step.check.cross_check import CrossCheck, Mismatch

HARDWARE = "hardware.jsonl"
"""File in the run directory with one line for each step in which devices disagreed."""


class HardwareChecks:
    """Decides which steps are checked, and records and reports disagreements between devices.

    Args:
        config: trainer section of the configuration.
        directory: directory of the run.
        alerts: receives an alert for each disagreement.
    """

    def __init__(self, config: TrainerConfig, directory: RunDirectory, alerts: Alerts):
        self._directory, self._alerts = directory, alerts
        settings = config.cross_check
        self._check = None if settings is None else CrossCheck(settings, config.seed, self._report)

    def check_for(self, step: int) -> CrossCheck | None:
        """Returns the check to make during the step with this number, counted from 1; None if none is due."""
        return self._check if self._check is not None and self._check.is_due(step) else None

    def _report(self, mismatch: Mismatch) -> None:
        if not is_lead():
            return
        append_line(self._directory.path / HARDWARE, json.dumps(mismatch.as_dict()).encode())
        outcome = "; the gradient was computed again, and training goes on" if mismatch.repaired else ""
        self._alerts.report_hardware(mismatch.step, mismatch.describe() + outcome)
