"""Shuts down the machine when a command ends for any reason, to save the cost of an idle machine."""

from __future__ import annotations

import atexit
import subprocess
import sys
import time

_DEFAULT_SECONDS = 5.0


def shut_down_at_exit(setting: bool | float) -> None:
    """Registers a shutdown of the machine at the exit of this process.

    Args:
        setting: the value of `trainer.shutdown_at_exit`: False for no shutdown, True for a delay of 5 s, or the delay
            in seconds.
    """
    if setting is not False:
        atexit.register(_shut_down, _DEFAULT_SECONDS if setting is True else float(setting))


def _shut_down(seconds: float) -> None:
    sys.stderr.write(f"trainer.shutdown_at_exit: this machine shuts down in {seconds:g} s\n")
    sys.stderr.flush()
    # Leaves time to press Ctrl-C, and for other exit handlers to finish.
    time.sleep(seconds)
    # Without root privileges, `shutdown` fails and sudo is tried, with -n because nobody can type a password.
    for command in (["shutdown", "-h", "now"], ["sudo", "-n", "shutdown", "-h", "now"]):
        try:
            if subprocess.run(command, check=False).returncode == 0:
                return
        except OSError:
            continue
    sys.stderr.write("trainer.shutdown_at_exit: `shutdown -h now` did not succeed\n")
