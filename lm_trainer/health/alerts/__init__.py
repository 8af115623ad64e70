"""Alerts of a run, `trainer.alerts`: a file for each kind, and the section that lists them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from pydantic import PositiveInt, field_validator

from lm_trainer.core.config import Config
from lm_trainer.core.credentials import COMMAND, without_credentials
from lm_trainer.health.alerts.base import AlertKind
from lm_trainer.health.alerts.data_wait import DataWait
from lm_trainer.health.alerts.divergence import Divergence
from lm_trainer.health.alerts.grad_norm import GradNorm
from lm_trainer.health.alerts.loss_spike import LossSpike
from lm_trainer.health.alerts.memory import DeviceMemory
from lm_trainer.health.alerts.non_finite import NonFinite
from lm_trainer.health.alerts.rules import Rule
from lm_trainer.health.alerts.step_time import StepTime

_OF_A_SHELL = {"|", "||", "&", "&&", ";", "<", ">", ">>", "2>", "2>&1"}


class AlertsConfig(Config):
    """Alerts: to the terminal, metrics.jsonl, the trackers and a command. They look at metrics that are there anyway,
    after the step, and change no number of the run. Each kind may be null: never.
    """

    loss_spike: LossSpike | None = LossSpike()
    divergence: Divergence | None = Divergence()
    grad_norm: GradNorm | None = GradNorm()
    non_finite: NonFinite | None = NonFinite()
    step_time: StepTime | None = StepTime()
    data_wait: DataWait | None = DataWait()
    memory: DeviceMemory | None = DeviceMemory()

    no_progress: bool = True
    """Also alert when the watchdog (`trainer.watchdog`) says that the run makes no progress."""
    stop: tuple[Rule, ...] = ()
    """Rules that end the run, with exit code 3. To leave the updates of bad steps out instead, see
    `optimizer.skip_bad_steps`."""
    quiet_steps: PositiveInt = 100
    """Steps after an alert in which its kind is silent."""
    command: str | None = None
    """Command that is run for each alert, with a JSON object on its standard input: `run`, `run_dir`, `time`, `step`,
    `alert`, `message`, `metrics`. It is no line of a shell; its arguments are separated by spaces, as in
    `./notify --to me`."""

    @field_validator("command")
    @classmethod
    def _is_no_line_of_a_shell(cls, command: str | None) -> str | None:
        for word in shlex.split(command or ""):
            if word in _OF_A_SHELL:
                line = shlex.quote(without_credentials({COMMAND: command})[COMMAND])
                raise ValueError(f"{word} is for a shell, and the command runs without one; write: sh -c {line}")
        return command

    @property
    def kinds(self) -> Mapping[str, AlertKind]:
        """Those that are on, by name."""
        found = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in found.items() if isinstance(value, AlertKind)}
