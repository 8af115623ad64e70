"""Trains the runs of a sweep one after the other, each in its own process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from lm_trainer.core.errors import EXIT_HARDWARE, EXIT_PREEMPTED, EXIT_STOPPED, UserError
from lm_trainer.core.files import local_path
from lm_trainer.core.terminal_loss import redirect_terminal_to_devnull, signals_to_handle
from lm_trainer.run.config.recorded_keys import config_with_recorded_keys
from lm_trainer.run.config.run_config import RunConfig, numeric_differences, numeric_identity
from lm_trainer.run.files.listing import list_runs
from lm_trainer.run.files.records import RUN, read_run_record, recorded_identity
from lm_trainer.sweep.settings import SweepRun

EXIT_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ENDS_SWEEP = {EXIT_PREEMPTED, EXIT_STOPPED, EXIT_HARDWARE, *(-n for n in _SIGNALS), *(128 + n for n in _SIGNALS)}
"""Exit codes of a run that was stopped from outside, or whose device computes wrong results. The other runs are not
started."""


def run_directory(config: RunConfig, run: SweepRun) -> Path:
    """Returns the directory of a run of a sweep."""
    return local_path(config.trainer.log_dir) / run.run_id


def run_state(config: RunConfig, run: SweepRun) -> str:
    """Returns the state of a run as in `lmt runs`.

    Raises:
        UserError: if the run is done, but with another configuration.
    """
    directory = run_directory(config, run)
    if not (directory / RUN).is_file():
        return "not begun"
    (listing,) = list_runs([directory])
    # A model section from a Hugging Face checkpoint is known only when the run starts.
    if listing.state == "done" and not config.use_hf_model_config:
        identity = recorded_identity(read_run_record(directory), directory)
        current = config_with_recorded_keys(config, identity)
        if differences := numeric_differences(identity, numeric_identity(current), current):
            raise UserError(
                f"{directory}: this run is done, but with another configuration:\n  " + "\n  ".join(differences) + "\n"
                "Give the sweep another --name, or undo these changes"
            )
    return listing.state


def train_runs(commands: Sequence[tuple[str, Sequence[str]]], note: Callable[[str], None]) -> int:
    """Runs `lmt` once for each command, and waits for it. A run that fails does not end the sweep.

    Args:
        commands: run IDs, and the arguments of `lmt` for each.
        note: receives a line about every run.

    Returns:
        the exit code: 0 if all commands succeeded; the code of a run that was stopped from outside; otherwise the code
        of the first one that failed.
    """
    first_failure = 0
    for number, (run_id, arguments) in enumerate(commands, 1):
        note(f"run {number} of {len(commands)}: {run_id}")
        code = _run_and_wait([sys.executable, "-m", "lm_trainer", *arguments])
        if code in _ENDS_SWEEP:
            note(f"{run_id} was stopped; the same command continues the sweep")
            return code if code > 0 else EXIT_INTERRUPTED
        if code:
            note(f"{run_id} failed with exit code {code}; the sweep goes on")
            first_failure = first_failure or (code if code > 0 else 1)
    return first_failure


def _run_and_wait(command: Sequence[str]) -> int:
    started: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGHUP:
            redirect_terminal_to_devnull()
        # The terminal sends SIGINT to the child too, and a second one would end it before everything is saved.
        if number != signal.SIGINT:
            received.append(number)
            for process in started:
                process.send_signal(number)

    # Installed first, because a signal that ends the sweep would leave its run alone.
    signals = signals_to_handle((*_SIGNALS, signal.SIGUSR1))
    previous = {number: signal.signal(number, forward) for number in signals}
    try:
        process = subprocess.Popen(command)
        started.append(process)
        for number in received:
            process.send_signal(number)
        return process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
