"""Alerts of a run: one module per kind of alert, and the config section `trainer.alerts` that lists them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from pydantic import PositiveInt, field_validator

from lm_trainer.core.config import Config
from lm_trainer.core.credentials import COMMAND, without_credentials
from lm_trainer.health.alerts.base import AlertKind
from lm_trainer.health.alerts.data_wait import DataWait
from lm_trainer.health.alerts.divergence import Divergence
from lm_trainer.health.alerts.expert_load import ExpertLoad
from lm_trainer.health.alerts.grad_norm import GradNorm
from lm_trainer.health.alerts.loss_spike import LossSpike
from lm_trainer.health.alerts.memory import DeviceMemory
from lm_trainer.health.alerts.non_finite import NonFinite
from lm_trainer.health.alerts.off_prediction import OffPrediction
from lm_trainer.health.alerts.rules import Rule
from lm_trainer.health.alerts.step_time import StepTime
from lm_trainer.health.alerts.straggler import Straggler

_SHELL_OPERATORS = {"|", "||", "&", "&&", ";", "<", ">", ">>", "2>", "2>&1"}


class AlertsConfig(Config):
    """Alerts sent to the terminal, metrics.jsonl, the trackers and a command.

    They evaluate metrics that are logged anyway, after each step, and do not affect the results of the run. Set a kind
    to null to turn it off.
    """

    loss_spike: LossSpike | None = LossSpike()
    divergence: Divergence | None = Divergence()
    grad_norm: GradNorm | None = GradNorm()
    non_finite: NonFinite | None = NonFinite()
    step_time: StepTime | None = StepTime()
    data_wait: DataWait | None = DataWait()
    memory: DeviceMemory | None = DeviceMemory()
    expert_load: ExpertLoad | None = ExpertLoad()
    straggler: Straggler | None = Straggler()
    off_prediction: OffPrediction | None = None

    no_progress: bool = True
    """Also alert when the watchdog (`trainer.watchdog`) detects no progress."""
    stop: tuple[Rule, ...] = ()
    """Rules that end the run, with exit code 3. To skip the updates of bad steps instead, see
    `optimizer.skip_bad_steps`."""
    quiet_steps: PositiveInt = 100
    """Number of steps after an alert during which alerts of the same kind are suppressed."""
    command: str | None = None
    """Command run for each alert, with a JSON object on its standard input: `run`, `run_dir`, `time`, `step`, `alert`,
    `message`, `metrics`. It runs without a shell; arguments are separated by spaces, as in `./notify --to me`."""

    @field_validator("command")
    @classmethod
    def _is_no_line_of_a_shell(cls, command: str | None) -> str | None:
        for word in shlex.split(command or ""):
            if word in _SHELL_OPERATORS:
                line = shlex.quote(without_credentials({COMMAND: command})[COMMAND])
                raise ValueError(f"{word} is for a shell, and the command runs without one; write: sh -c {line}")
        return command

    @property
    def kinds(self) -> Mapping[str, AlertKind]:
        """Enabled alert kinds, by name."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in fields.items() if isinstance(value, AlertKind)}
