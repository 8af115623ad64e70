"""Evaluates alerts and sends them to the terminal, the trackers and a user's command."""

from __future__ import annotations

import json
import shlex
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from lm_trainer.core.credentials import without_credentials
from lm_trainer.health.alerts import AlertsConfig
from lm_trainer.health.alerts.base import STEP, Alert
from lm_trainer.health.alerts.rules import RuleStop, build_rule_check
from lm_trainer.trackers.base import Composite
from lm_trainer.trackers.console import Progress
from lm_trainer.trackers.jsonl import encode_non_finite

_COMMAND_SECONDS = 60.0
"""Timeout of a single command and, at the end of a run, of all commands that are still running, in seconds."""


class Alerts:
    """Watches the metrics of a run and sends alerts without blocking.

    Args:
        config: the alert kinds and their settings.
        run_dir: the run directory, included in alerts; its last component is the run ID.
        trackers: trackers to send alerts to.
        progress: the terminal.
        sends: True in the one process that sends alerts. Other processes only apply the stop rules.
    """

    def __init__(self, config: AlertsConfig, run_dir: Path, trackers: Composite, progress: Progress, *, sends: bool):
        self._config, self._run_dir, self._trackers, self._progress = config, run_dir, trackers, progress
        self._checks = {name: kind.build_check() for name, kind in config.kinds.items()} if sends else {}
        self._rules = build_rule_check(config.stop)
        self._sends, self._command_works = sends, True
        self._silent_until: dict[str, int] = {}
        # Runs one command at a time, so that slow commands do not pile up.
        self._commands = ThreadPoolExecutor(1, "alert command")
        self._running: list[Future[None]] = []
        self._stalls: list[str] = []
        self._lock, self._step = threading.Lock(), 0

    def check_step(self, step: int, metrics: Mapping[str, float], speed: Mapping[str, float]) -> None:
        """Evaluates the metrics of a step.

        Args:
            step: number of the step.
            metrics: logged metrics with the same values in every process, by name.
            speed: throughput metrics.

        Raises:
            RuleStop: if a rule ends the run.
            UserError: if a rule refers to an unknown metric.
        """
        self._step = step
        self._record_stalls(step)
        all_metrics = {**metrics, **speed}
        checked = {**all_metrics, STEP: step}
        for name, check in self._checks.items():
            message = check(checked)
            if message is not None:
                self._report_unless_quiet(Alert(step, name, message, all_metrics))
        try:
            self._rules(step, metrics)
        except RuleStop as stop:
            if self._sends:
                # The alert is not sent to the terminal, which shows the error anyway.
                self._log_and_run_command(Alert(step, "stop", str(stop), all_metrics))
            raise

    def handle_stall(self, message: str) -> None:
        """Handles a warning of the watchdog, in the watchdog's thread.

        The main thread hangs, so only the alert command runs immediately. The trackers receive the alert after the next
        step.
        """
        if not self._sends or not self._config.no_progress:
            return
        with self._lock:
            self._stalls.append(message)
        self._run_command(Alert(self._step, "no_progress", message, {}))

    def report_hardware(self, step: int, message: str) -> None:
        """Sends an alert about devices that computed different results."""
        if self._sends:
            self._report_alert(Alert(step, "hardware", message, {}))

    def report_straggler(self, step: int, message: str) -> None:
        """Sends an alert about a process that makes the others wait."""
        if self._sends:
            self._report_unless_quiet(Alert(step, "straggler", message, {}))

    def close(self) -> None:
        """Waits for running commands, up to a timeout. Calling it twice is safe."""
        if self._running:
            wait(self._running, timeout=_COMMAND_SECONDS)
        self._commands.shutdown(wait=False, cancel_futures=True)

    def _record_stalls(self, step: int) -> None:
        with self._lock:
            stalls, self._stalls = self._stalls, []
        for message in stalls:
            self._trackers.log_alert("no_progress", message, step=step)

    def _report_unless_quiet(self, alert: Alert) -> None:
        if alert.step > self._silent_until.get(alert.kind, 0):
            self._silent_until[alert.kind] = alert.step + self._config.quiet_steps
            self._report_alert(alert)

    def _report_alert(self, alert: Alert) -> None:
        self._progress.note(f"alert: step {alert.step}: {alert.message} ({alert.kind})")
        self._log_and_run_command(alert)

    def _log_and_run_command(self, alert: Alert) -> None:
        self._trackers.log_alert(alert.kind, alert.message, step=alert.step)
        self._run_command(alert)

    def _run_command(self, alert: Alert) -> None:
        if self._config.command is not None and self._command_works:
            self._running = [future for future in self._running if not future.done()]
            self._running.append(self._commands.submit(self._execute_command, self._config.command, alert))

    def _execute_command(self, command: str, alert: Alert) -> None:
        content = {
            "run": self._run_dir.name,
            "run_dir": str(self._run_dir.absolute()),
            "time": round(time.time(), 3),
            "step": alert.step,
            "alert": alert.kind,
            "message": alert.message,
            "metrics": encode_non_finite(dict(alert.metrics)),
        }
        try:
            done = subprocess.run(
                shlex.split(command),
                input=json.dumps(content),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=_COMMAND_SECONDS,
                check=False,
            )
            problem = f"exit code {done.returncode}: {done.stderr.strip()[-200:]}" if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
        if problem:
            # The failure is reported only once. Training continues, and the terminal still shows the alerts.
            self._command_works = False
            self._progress.note(without_credentials(f"trainer.alerts.command failed and is switched off: {problem}"))
